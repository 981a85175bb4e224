"""``run.py bench gate``: gated residual in one launch against ``addcmul_`` per segment."""

from .op_cases import bench


def main(argv):
    return bench("gate", ("gate",), argv, __doc__)

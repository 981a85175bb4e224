"""``run.py bench norm_modulate``: RMSNorm and modulation in one pass against torch's RMSNorm and four passes of modulation."""

from .op_cases import bench


def main(argv):
    return bench("norm_modulate", ("norm_modulate",), argv, __doc__)

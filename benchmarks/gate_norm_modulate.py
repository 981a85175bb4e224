"""``run.py bench gate_norm_modulate``: gated residual, RMSNorm and modulation in one pass against stock's three steps."""

from .op_cases import bench


def main(argv):
    return bench("gate_norm_modulate", ("gate_norm_modulate",), argv, __doc__)

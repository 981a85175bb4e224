"""``run.py bench norm_modulate_int8``: norm forms against stock's norm, modulation (and gate) and kitchen's quantiser."""

from .op_cases import bench


def main(argv):
    return bench("norm_modulate_int8", ("norm_modulate_int8", "gate_norm_modulate_int8"), argv, __doc__)

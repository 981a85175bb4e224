"""``run.py bench modulate_nvfp4``: modulation to NVFP4, alone and after norm and gate, against stock's chain."""

from .op_cases import bench


def main(argv):
    return bench("modulate_nvfp4", ("modulate_nvfp4", "norm_modulate_nvfp4", "gate_norm_modulate_nvfp4"), argv, __doc__)

"""``run.py bench nvfp4_quantize``: the attention output to NVFP4 against ``from_float``'s four kernels."""

from .op_cases import bench


def main(argv):
    return bench("nvfp4_quantize", ("nvfp4_quantize",), argv, __doc__)

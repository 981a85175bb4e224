"""``run.py bench swiglu_nvfp4``: SwiGLU to NVFP4 in two reads (one with a given tensor scale) against stock's six passes."""

from .op_cases import bench


def main(argv):
    return bench("swiglu_nvfp4", ("swiglu_nvfp4",), argv, __doc__)

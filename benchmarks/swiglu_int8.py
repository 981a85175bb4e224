"""``run.py bench swiglu_int8``: SwiGLU, rotation and quantisation of FC2's input, against kitchen's folded kernel."""

from .op_cases import bench


def main(argv):
    return bench("swiglu_int8", ("swiglu_int8",), argv, __doc__)

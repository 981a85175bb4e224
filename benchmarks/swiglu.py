"""``run.py bench swiglu``: SwiGLU in one pass against ``silu(gate).mul_(up)``."""

from .op_cases import bench


def main(argv):
    return bench("swiglu", ("swiglu",), argv, __doc__)

"""``run.py bench kernels``: every op beside its stock chain in one run: bytes, times, share of copy bandwidth, host time."""

from ..kernels.stock import NVFP4_OPS, OPS
from .int8_cases import OPS as INT8_OPS
from .op_cases import bench


def main(argv):
    return bench("kernels", (*OPS, *NVFP4_OPS, *INT8_OPS), argv, __doc__)

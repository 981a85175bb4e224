"""``python benchmarks norm_modulate_int8``: norm forms against stock's norm, modulation (and gate) and kitchen's quantiser."""

import torch

from .int8_cases import bench


def main(argv):
    tables = [{"table_dtype": dtype} for dtype in (torch.bfloat16, torch.float32)]
    return bench(
        "norm_modulate_int8", [(op, t) for op in ("norm_modulate_int8", "gate_norm_modulate_int8") for t in tables], argv, __doc__)

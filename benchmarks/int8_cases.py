"""The INT8-ConvRot ops beside their stock chains: cases for the GPU tests and the benchmarks."""

import torch

from ..kernels import norm_modulate_int8 as norm
from ..kernels import quantize_rotate_int8 as rotate
from ..kernels import swiglu_int8 as swiglu
from ..kernels.segments import row_map
from ..kernels.stock import Case, normal, tables, typical_segments

OPS = ("quantize_rotate_int8", "swiglu_int8", "norm_modulate_int8", "gate_norm_modulate_int8")


def make(op, tokens, device, *, width=None, ffn=14336, table_dtype=torch.float32, segments=None, draw=normal, weight=None, eps=1e-5):
    """A :class:`kernels.stock.Case` for one INT8 op.

    Args:
        op: one of :data:`OPS`. ``tokens``: rows. ``ffn``: F of ``swiglu_int8``. ``segments``: default a real job's.
        width: K (default 7168, attention's out_proj) or H (default 5376).
        table_dtype: of the AdaLN tables, which stay ordinary: a modulated value above 2**119 is outside the contract of the norm forms.
        draw: ``draw(shape, device, std=)`` makes the activations. ``weight``: bf16 ``[width]``, default near 1.
    """

    width = width or (7168 if op == "quantize_rotate_int8" else 5376)

    def take(columns, std=1.0):
        return draw((tokens, columns), device, std=std).to(torch.bfloat16)

    if op == "quantize_rotate_int8":
        x = take(width, 1.59)
        return Case(rotate.quantize_rotate_int8, rotate.stock, lambda: (x,), tokens * (3 * width + 4))
    if op == "swiglu_int8":
        gate_up = take(2 * ffn)
        return Case(swiglu.swiglu_int8, swiglu.stock, lambda: (gate_up,), tokens * (5 * ffn + 4))
    segments = typical_segments(tokens) if segments is None else segments
    rows = row_map(segments, tokens, device)
    shift, scale, gate = tables(width, device, table_dtype, 3)
    weight = normal((width,), device, std=0.1).add_(1).to(torch.bfloat16) if weight is None else weight
    x = take(width, 1.59)
    if op == "norm_modulate_int8":
        return Case(
            lambda x: norm.norm_modulate_int8(x, weight, shift, scale, rows, eps),
            lambda x: norm.stock(x, weight, shift, scale, segments, eps),
            lambda: (x,), tokens * (3 * width + 4))
    if op == "gate_norm_modulate_int8":
        other = take(width, 0.5)
        return Case(
            lambda x: (*norm.gate_norm_modulate_int8(x, other, gate, weight, shift, scale, rows, eps), x),
            lambda x: (*norm.stock_gated(x, other, gate, weight, shift, scale, segments, eps), x),
            lambda: (x.clone(),), tokens * (7 * width + 4))
    raise ValueError(f"there is no INT8 case for op {op!r}; there are {', '.join(OPS)}")

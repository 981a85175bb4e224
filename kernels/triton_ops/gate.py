"""``gate`` in Triton; the contract is ``kernels/gate.py`` as CUDA computes it: one fused multiply-add in fp32, one rounding to bf16 (or,
with TWICE, a product and a sum that both round)."""

import torch
import triton
import triton.language as tl


@triton.jit
def gate_kernel(x, other, gate, rows, x_stride, other_stride, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    at = x + token * x_stride + column
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(other + token * other_stride + column, mask=inside, other=0.0).to(tl.float32)
    if TWICE:
        y = v + (o * g).to(tl.bfloat16).to(tl.float32)
    else:
        y = tl.fma(o, g, v)
    tl.store(at, y.to(tl.bfloat16), mask=inside)


def gate(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, twice: bool = False) -> torch.Tensor:
    """In place on ``x`` (bf16, unit stride in the last dimension); returns it."""
    tokens, width = x.shape
    block = min(2048, triton.next_power_of_2(width))
    if x.numel():
        gate_kernel[(tokens, triton.cdiv(width, block))](
            x, other, gate, rows, x.stride(0), other.stride(0), gate.stride(0), WIDTH=width, BLOCK=block, TWICE=twice,
            enable_fp_fusion=False,
        )
    return x

"""``swiglu`` in Triton; the contract is ``kernels/swiglu.py``: silu in fp32 with an IEEE division, as torch computes it."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def swiglu_kernel(gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LIBDEVICE: tl.constexpr, VALUE_FIRST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = gate_up + token * stride + column
    gate_at = WIDTH if VALUE_FIRST else 0
    g = tl.load(at + gate_at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at + WIDTH - gate_at, mask=inside, other=0.0).to(tl.float32)
    e = libdevice.exp(-g) if LIBDEVICE else tl.exp(-g)  # the interpreter has no libdevice
    s = tl.div_rn(g, 1.0 + e).to(tl.bfloat16).to(tl.float32)
    tl.store(out + token * WIDTH + column, (s * u).to(tl.bfloat16), mask=inside)


def swiglu(gate_up: torch.Tensor, value_first: bool = False) -> torch.Tensor:
    """``[S, 2F]`` bf16 with unit stride in the last dimension -> new ``[S, F]``."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width))
    if out.numel():
        swiglu_kernel[(tokens, triton.cdiv(width, block))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, LIBDEVICE=gate_up.is_cuda, VALUE_FIRST=value_first,
            enable_fp_fusion=False,
        )
    return out

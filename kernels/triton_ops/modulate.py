"""``modulate`` in Triton; the contract is ``kernels/modulate.py``."""

import torch
import triton
import triton.language as tl


@triton.jit
def modulate_kernel(h, shift, scale, rows, h_stride, shift_stride, scale_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    a = tl.load(scale + row * scale_stride + column, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    b = tl.load(shift + row * shift_stride + column, mask=inside, other=0.0).to(tl.bfloat16).to(tl.float32)
    a = (1.0 + a).to(tl.bfloat16).to(tl.float32)
    at = h + token * h_stride + column
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    v = (v * a).to(tl.bfloat16).to(tl.float32)
    tl.store(at, (v + b).to(tl.bfloat16), mask=inside)


def modulate(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """In place on ``h`` (bf16, unit stride in the last dimension); returns it."""
    tokens, width = h.shape
    block = min(2048, triton.next_power_of_2(width))
    if h.numel():
        modulate_kernel[(tokens, triton.cdiv(width, block))](
            h, shift, scale, rows, h.stride(0), shift.stride(0), scale.stride(0), WIDTH=width, BLOCK=block, enable_fp_fusion=False
        )
    return h

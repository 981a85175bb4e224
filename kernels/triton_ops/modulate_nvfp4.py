"""``modulate_nvfp4`` in Triton; the contract is ``cuda`` of ``kernels/nvfp4_quantize.py`` on what ``kernels/modulate.py`` gives."""

import torch
import triton
import triton.language as tl

from .nvfp4_quantize import columns_inside, launch, load16, merge_amax, pack, tensor_scale, tile


@triton.jit
def modulated(h, shift, scale, rows, h_stride, shift_stride, scale_stride, token, tokens, columns, K):
    """bf16 values in fp32; zeros outside, whatever the tables hold."""
    inside = columns_inside(token, tokens, columns, K)
    row = tl.load(rows + token, mask=token < tokens, other=0).to(tl.int64)
    a = load16(scale, row * scale_stride, columns, inside).to(tl.bfloat16).to(tl.float32)
    a = (1.0 + a).to(tl.bfloat16).to(tl.float32)
    b = load16(shift, row * shift_stride, columns, inside).to(tl.bfloat16).to(tl.float32)
    y = (load16(h, token * h_stride, columns, inside) * a).to(tl.bfloat16).to(tl.float32)
    return (y + b).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def amax_kernel(
    h, shift, scale, rows, h_stride, shift_stride, scale_stride, amax, tokens,
    K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):
    token, block, columns = tile(TOKENS, BLOCKS)
    merge_amax(modulated(h, shift, scale, rows, h_stride, shift_stride, scale_stride, token, tokens, columns, K), amax)


@triton.jit(do_not_specialize=["tokens"])
def pack_kernel(
    h, shift, scale, rows, h_stride, shift_stride, scale_stride, amax, g, q, scales, tokens,
    K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, DYNAMIC: tl.constexpr,
):
    token, block, columns = tile(TOKENS, BLOCKS)
    y = modulated(h, shift, scale, rows, h_stride, shift_stride, scale_stride, token, tokens, columns, K)
    pack(y, tensor_scale(amax, g, DYNAMIC), token, tokens, block, q, scales, K, TOKENS * BLOCKS)


def modulate_nvfp4(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, tensor_scale: torch.Tensor | None):
    """``[S, H]`` bf16 with unit stride in the last dimension, only read -> ``(qdata, tensor_scale, block_scale)``."""
    inputs = h, shift, scale, rows, h.stride(0), shift.stride(0), scale.stride(0)
    return launch(amax_kernel, pack_kernel, inputs, tensor_scale, *h.shape)

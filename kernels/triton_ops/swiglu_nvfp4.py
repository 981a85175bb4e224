"""``swiglu_nvfp4`` in Triton; the contract is ``cuda`` of ``kernels/nvfp4_quantize.py`` on what ``kernels/swiglu.py`` gives."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .nvfp4_quantize import columns_inside, launch, load16, merge_amax, pack, tensor_scale, tile


@triton.jit
def activated(gate_up, stride, token, tokens, columns, K, LIBDEVICE: tl.constexpr):
    """bf16 values in fp32; zeros outside."""
    inside = columns_inside(token, tokens, columns, K)
    gate = load16(gate_up, token * stride, columns, inside)
    up = load16(gate_up + K, token * stride, columns, inside)
    e = libdevice.exp(-gate) if LIBDEVICE else tl.exp(-gate)  # the interpreter has no libdevice
    return (tl.div_rn(gate, 1.0 + e).to(tl.bfloat16).to(tl.float32) * up).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def amax_kernel(gate_up, stride, amax, tokens, K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, LIBDEVICE: tl.constexpr):
    token, block, columns = tile(TOKENS, BLOCKS)
    merge_amax(activated(gate_up, stride, token, tokens, columns, K, LIBDEVICE), amax)


@triton.jit(do_not_specialize=["tokens"])
def pack_kernel(
    gate_up, stride, amax, g, q, scales, tokens,
    K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, DYNAMIC: tl.constexpr, LIBDEVICE: tl.constexpr,
):
    token, block, columns = tile(TOKENS, BLOCKS)
    y = activated(gate_up, stride, token, tokens, columns, K, LIBDEVICE)
    pack(y, tensor_scale(amax, g, DYNAMIC), token, tokens, block, q, scales, K, TOKENS * BLOCKS)


def swiglu_nvfp4(gate_up: torch.Tensor, tensor_scale: torch.Tensor | None):
    """``[S, 2F]`` bf16 with unit stride in the last dimension -> ``(qdata, tensor_scale, block_scale)``."""
    inputs = gate_up, gate_up.stride(0)
    return launch(amax_kernel, pack_kernel, inputs, tensor_scale, gate_up.shape[0], gate_up.shape[1] // 2, LIBDEVICE=gate_up.is_cuda)

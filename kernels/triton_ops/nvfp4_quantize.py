"""``nvfp4_quantize`` in Triton; the contract is ``cuda`` of ``kernels/nvfp4_quantize.py``. Also the packing that the fused forms share.

Written against the contract, not after the CUDA source: E2M1 codes by comparison with the midpoints, E4M3 by adding a power of two.
``tl.float8e4nv`` is not used: the assemblers that Triton 3.6 bundles lose one of two conversion results that are both stored and used.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def multiply(a, b):
    """Subnormal operands and results are flushed."""
    return tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """The approximate one; subnormals are flushed."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def e4m3(s):
    """``(byte, value)`` of 0 <= s <= 448, nearest even: the sum with 2^20 times the binade (at least 2^-6) is a multiple of the spacing."""
    binade = tl.maximum(bits(s) & 0x7F800000, 0x3C800000)
    magic = (binade + 0x0A000000).to(tl.float32, bitcast=True)
    total = s + magic
    return (bits(total) - bits(magic) + ((binade - 0x3C800000) >> 20)).to(tl.uint8), total - magic


@triton.jit
def e2m1(y):
    """int32 code, nearest even, saturating, NaN to +6."""
    a = tl.abs(y)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return tl.where(y == y, code | ((bits(y) >> 28) & 8), 7)


@triton.jit
def merge_amax(y, amax):
    """The largest magnitude of the tile into ``*amax``, as bits: they order like the values, with NaN above all."""
    tl.atomic_max(amax, tl.max(tl.max(bits(y) & 0x7FFFFFFF, axis=1), axis=0), sem="relaxed")


@triton.jit
def tensor_scale(amax, scale, DYNAMIC: tl.constexpr):
    if DYNAMIC:
        g = (tl.load(amax).to(tl.float32, bitcast=True) * 0.00037202381645329297).to(tl.bfloat16).to(tl.float32)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, g)
    else:
        g = tl.load(scale)
    return g


@triton.jit
def tile(TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's blocks of 16 columns, flattened: their tokens (int64), their block columns, and their columns ``[.., 16]``."""
    i = tl.arange(0, TOKENS * BLOCKS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + i // BLOCKS
    block = tl.program_id(1) * BLOCKS + i % BLOCKS
    return token, block, block[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def load16(x, base, columns, inside):
    """fp32 values at ``base`` (one offset per block) plus ``columns``."""
    return tl.load(x + base[:, None] + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def columns_inside(token, tokens, columns, K):
    return columns < tl.where(token < tokens, K, 0)[:, None]


@triton.jit
def pack(y, g, token, tokens, block, q, scales, K, BLOCKS: tl.constexpr):
    """A tile of bf16 values in fp32 ``[BLOCKS, 16]``: codes, and scales into the 128x4 swizzle. Padding must come as zeros."""
    amax = tl.max(tl.where(y == y, tl.abs(y), -1.0), axis=1)
    amax = tl.where(amax < 0.0, float("nan"), amax)  # nothing but NaN
    one = tl.full([BLOCKS], 1.0, tl.float32)
    s = multiply(multiply(amax, one * 0.16666667163372040), one * reciprocal(g))
    byte, value = e4m3(tl.where(s <= 448.0, s, 448.0))
    enc = reciprocal(multiply(one * g, value))
    enc = tl.where(enc <= 3.4028234663852886e38, enc, 3.4028234663852886e38)
    code = e2m1(multiply(y, tl.broadcast_to(enc[:, None], [BLOCKS, 16])))
    even, odd = tl.split(tl.reshape(code, [BLOCKS, 8, 2]))
    padded_tokens, words = (tokens + 15) // 16 * 16, (K // 16 + 3) // 4
    inside = block < tl.where(token < padded_tokens, K // 16, 0)
    at = token[:, None] * (K // 2) + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(q + at, ((even << 4) | odd).to(tl.uint8), mask=inside[:, None])
    offset = ((token // 128 * words + block // 4) * 32 + token % 32) * 16 + token % 128 // 32 * 4 + block % 4
    in_scales = block < tl.where(token < (tokens + 127) // 128 * 128, words * 4, 0)
    tl.store(scales + offset, tl.where(inside, byte, 0), mask=in_scales)


@triton.jit(do_not_specialize=["tokens"])
def amax_kernel(x, x_stride, amax, tokens, K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    token, block, columns = tile(TOKENS, BLOCKS)
    merge_amax(load16(x, token * x_stride, columns, columns_inside(token, tokens, columns, K)), amax)


@triton.jit(do_not_specialize=["tokens"])
def pack_kernel(
    x, x_stride, amax, scale, q, scales, tokens, K, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, DYNAMIC: tl.constexpr
):
    token, block, columns = tile(TOKENS, BLOCKS)
    y = load16(x, token * x_stride, columns, columns_inside(token, tokens, columns, K))
    pack(y, tensor_scale(amax, scale, DYNAMIC), token, tokens, block, q, scales, K, TOKENS * BLOCKS)


def launch(amax_kernel, pack_kernel, inputs: tuple, tensor_scale: torch.Tensor | None, tokens: int, columns: int, **constants):
    """Both passes of one op (one with a ``tensor_scale``); returns the triple. ``inputs`` are the kernels' first parameters."""
    device = inputs[0].device
    padded_tokens, scale_rows, words = (tokens + 15) // 16 * 16, (tokens + 127) // 128 * 128, (columns + 63) // 64
    q = torch.empty((padded_tokens, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((scale_rows, words * 4), dtype=torch.uint8, device=device)
    dynamic = tensor_scale is None
    scale = torch.zeros((), dtype=torch.float32, device=device) if dynamic else tensor_scale
    amax = torch.zeros(1, dtype=torch.int32, device=device)
    size = 128 if device.type == "cuda" else 4096  # 16 values a thread; the interpreter's time goes with the number of programs
    blocks = min(size, triton.next_power_of_2(words * 4))
    constants = {"TOKENS": size // blocks, "BLOCKS": blocks, "enable_fp_fusion": False, **constants}

    def grid(rows):
        return triton.cdiv(rows, size // blocks), triton.cdiv(words * 4, blocks)

    if tokens and dynamic:
        amax_kernel[grid(tokens)](*inputs, amax, tokens, columns, **constants)
    if tokens:
        pack_kernel[grid(scale_rows)](*inputs, amax, scale, q, scales, tokens, columns, DYNAMIC=dynamic, **constants)
    return q, scale, scales.view(torch.float8_e4m3fn)


def nvfp4_quantize(x: torch.Tensor, tensor_scale: torch.Tensor | None):
    """``[S, K]`` bf16 with unit stride in the last dimension -> ``(qdata, tensor_scale, block_scale)``."""
    return launch(amax_kernel, pack_kernel, (x, x.stride(0)), tensor_scale, *x.shape)

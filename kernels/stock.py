"""What stock runs where an op stands, statement for statement, and inputs for both: for the check, the tests and the benchmarks.

The statements are those of ComfyUI 0.33's ``comfy/ldm/minimax/model.py`` (``_mod_scale_shift``, ``_mod_gate``, ``DiTBlock.forward``,
``Attention.forward``) and ``comfy/ops.py`` (``_swiglu_eager``); the host tests hold them against ComfyUI's own functions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import gate_norm_modulate as _gate_norm_modulate
from . import modulate_nvfp4 as _modulate_nvfp4
from . import norm_modulate as _norm_modulate
from . import nvfp4_quantize as _nvfp4_quantize
from . import qk_norm_rope as _qk_norm_rope
from . import swiglu as _swiglu
from . import swiglu_nvfp4 as _swiglu_nvfp4
from .gate import gate as gate_op
from .modulate import modulate as modulate_op
from .segments import row_map

TABLE_ROWS = 6  # two timesteps (latent, clean condition) of three modalities


def modulate(h, shift, scale, segments):
    for a, b, row in segments:
        h[a:b].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return h


def gate(x, other, gate, segments):
    for a, b, row in segments:
        x[a:b].addcmul_(other[a:b], gate[row].to(x.dtype))
    return x


def norm_modulate(x, weight, shift, scale, segments, eps):
    return modulate(torch.nn.functional.rms_norm(x, weight.shape, weight, eps), shift, scale, segments)


def gate_norm_modulate(x, other, gate_table, weight, shift, scale, segments, eps):
    x = gate(x, other, gate_table, segments)
    return norm_modulate(x, weight, shift, scale, segments, eps)


def qk_norm_rope(q, k, freqs, q_weight, k_weight, eps):
    return _qk_norm_rope.reference(q, k, freqs, q_weight, k_weight, eps)


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def quantize_nvfp4(x, tensor_scale=None):
    """What an NVFP4 Linear makes of its input; the three tensors of the ``QuantizedTensor``."""
    from comfy_kitchen.tensor import QuantizedTensor

    quantized = QuantizedTensor.from_float(x, _nvfp4_quantize.LAYOUT, scale=tensor_scale)
    return quantized._qdata, quantized._params.scale, quantized._params.block_scale


def typical_segments(tokens: int) -> list[tuple[int, int, int]]:
    """Text, audio and video in the proportions of a real job, each with its modulation row."""
    text = min(100, tokens // 3)
    audio = text + min(414, tokens // 3)
    return [(0, text, 1), (text, audio, 5), (audio, tokens, 0)]


@dataclass
class Case:
    """One call of an op and its stock counterpart on the same inputs.

    Attributes:
        ours, stock: take the values of ``inputs()`` and return every tensor the call writes, as a tuple.
        inputs: a fresh set of arguments (the op writes into some of them).
        traffic: bytes that have to move between the chip and its memory: each input read once, each output written once.
    """

    ours: Callable[..., tuple]
    stock: Callable[..., tuple]
    inputs: Callable[[], tuple]
    traffic: int


def normal(shape, device, generator=None, std=1.0):
    return torch.randn(shape, device=device, generator=generator).mul_(std)


def tables(width, device, dtype, count, draw=normal, rows=TABLE_ROWS):
    """``count`` AdaLN tables ``[rows, width]`` as a block gets them: column chunks of one tensor."""
    return draw((rows, count * width), device, std=0.3).to(dtype).chunk(count, dim=-1)


def make(op: str, tokens: int, device, *, width: int = 5376, heads: int = 56, ffn: int = 14336, table_dtype=torch.float32,
         dtype=torch.bfloat16, segments=None, draw=normal, eps: float = 1e-5, tensor_scale=None) -> Case:
    """A :class:`Case` for one of the six bf16 ops or the five NVFP4 ones.

    Args:
        op: its name. ``tokens``: packed rows. ``width``: hidden size. ``heads``: of 128 channels. ``ffn``: output width of ``swiglu``.
        table_dtype: of the AdaLN tables. ``dtype``: of the activations and weights.
        segments: default :func:`typical_segments`.
        draw: ``draw(shape, device, std=)`` makes the activations, weights and tables (fp32 or ``dtype``).
        tensor_scale: a number for the NVFP4 ops. Without one they read their input twice, which their ``traffic`` counts.
    """
    segments = typical_segments(tokens) if segments is None else segments
    size = torch.empty((), dtype=dtype).element_size()
    activation = tokens * width * size

    def take(*shape, std=1.0):
        return draw(shape, device, std=std).to(dtype)

    if op == "swiglu":
        gate_up = take(tokens, 2 * ffn)
        return Case(lambda t: (_swiglu.swiglu(t),), lambda t: (swiglu(t),), lambda: (gate_up.clone(),), 3 * tokens * ffn * size)
    if op == "qk_norm_rope":
        inner = heads * 128
        qkv, freqs = take(tokens, 3 * inner), rotation_table(tokens, device, dtype)
        weights = take(128), take(128)

        def inputs():
            buffer = qkv.clone()
            q, k, _ = buffer.split(inner, dim=-1)
            return q.view(tokens, heads, 128), k.view(tokens, heads, 128), freqs, *weights, eps, buffer

        def call(function):
            return lambda *a: (function(*a[:-1]), a[-1])[1:]  # the whole buffer: v must stay as it was

        return Case(call(_qk_norm_rope.qk_norm_rope), call(qk_norm_rope), inputs, 4 * tokens * inner * size + freqs.nbytes)

    packed = tokens * (ffn if op == "swiglu_nvfp4" else width) * 9 // 16  # codes and block scales
    passes = 2 if tensor_scale is None else 1
    tensor_scale = None if tensor_scale is None else torch.tensor(tensor_scale, dtype=torch.float32, device=device)
    if op == "swiglu_nvfp4":
        gate_up = take(tokens, 2 * ffn)
        return Case(
            lambda t: _swiglu_nvfp4.swiglu_nvfp4(t, tensor_scale), lambda t: quantize_nvfp4(swiglu(t), tensor_scale),
            lambda: (gate_up.clone(),), passes * gate_up.nbytes + packed)
    if op == "nvfp4_quantize":
        x = take(tokens, width)
        return Case(
            lambda t: _nvfp4_quantize.nvfp4_quantize(t, tensor_scale), lambda t: quantize_nvfp4(t, tensor_scale),
            lambda: (x.clone(),), passes * activation + packed)

    rows = row_map(segments, tokens, device)
    shift, scale, gate_table = tables(width, device, table_dtype, 3, draw)
    x, other, weight = take(tokens, width, std=1.59), take(tokens, width, std=0.5), take(width)
    if op == "modulate":
        return Case(
            lambda h: (modulate_op(h, shift, scale, rows),), lambda h: (modulate(h, shift, scale, segments),),
            lambda: (x.clone(),), 2 * activation)
    if op == "gate":
        return Case(
            lambda x: (gate_op(x, other, gate_table, rows),), lambda x: (gate(x, other, gate_table, segments),),
            lambda: (x.clone(),), 3 * activation)
    if op == "norm_modulate":
        return Case(
            lambda x: (_norm_modulate.norm_modulate(x, weight, shift, scale, rows, eps),),
            lambda x: (norm_modulate(x, weight, shift, scale, segments, eps),),
            lambda: (x.clone(),), 2 * activation)
    if op == "gate_norm_modulate":
        return Case(
            lambda x: (_gate_norm_modulate.gate_norm_modulate(x, other, gate_table, weight, shift, scale, rows, eps), x),
            lambda x: (gate_norm_modulate(x, other, gate_table, weight, shift, scale, segments, eps), x),
            lambda: (x.clone(),), 4 * activation)
    if op == "modulate_nvfp4":
        return Case(
            lambda h: _modulate_nvfp4.modulate_nvfp4(h, shift, scale, rows, tensor_scale),
            lambda h: quantize_nvfp4(modulate(h, shift, scale, segments), tensor_scale),
            lambda: (x.clone(),), passes * activation + packed)
    if op == "norm_modulate_nvfp4":
        return Case(
            lambda x: _modulate_nvfp4.norm_modulate_nvfp4(x, weight, shift, scale, rows, eps, tensor_scale),
            lambda x: quantize_nvfp4(norm_modulate(x, weight, shift, scale, segments, eps), tensor_scale),
            lambda: (x.clone(),), passes * activation + packed)
    if op == "gate_norm_modulate_nvfp4":
        return Case(
            lambda x: (*_modulate_nvfp4.gate_norm_modulate_nvfp4(
                x, other, gate_table, weight, shift, scale, rows, eps, tensor_scale), x),
            lambda x: (*quantize_nvfp4(gate_norm_modulate(x, other, gate_table, weight, shift, scale, segments, eps), tensor_scale), x),
            lambda: (x.clone(),), (2 + passes) * activation + packed)
    raise ValueError(f"there is no case for op {op!r}; there are {', '.join(OPS + NVFP4_OPS)}")


OPS = ("norm_modulate", "gate_norm_modulate", "qk_norm_rope", "modulate", "gate", "swiglu")
NVFP4_OPS = ("nvfp4_quantize", "modulate_nvfp4", "norm_modulate_nvfp4", "gate_norm_modulate_nvfp4", "swiglu_nvfp4")


def rotation_table(tokens, device, dtype):
    """A real rotation table ``[1, tokens, 1, 48, 2, 2]``: cosines and sines of random angles."""
    angle = torch.rand(tokens, 48, device=device) * 400 - 200
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.stack([cos, -sin, sin, cos], dim=-1).reshape(1, tokens, 1, 48, 2, 2).to(dtype)

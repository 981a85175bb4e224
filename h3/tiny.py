"""Tiny random-weight MiniMax H3 files that an unpatched ComfyUI >= 0.33 loads, for tests and the demo.

ComfyUI detects every width of the DiT from its tensors (``comfy/model_detection.py``, ``minimax_h3``), so the DiT here
is really small, with the proportions that kernels care about kept: head width 128, rope over 96 of it, every width a
multiple of 128. The widths of the VAEs and the text encoder are fixed in ComfyUI: see :mod:`.tiny_thin`.

The same ``seed`` gives the same bytes, file by file, whatever other files are asked for.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import torch

HIDDEN, LAYERS, REFINER_LAYERS, HEADS, HEAD_DIM, FFN = 256, 2, 1, 2, 128, 512
TEXT_DIM = 5120  # what the thin (and the real) text encoder gives
LATENT_CHANNELS, AUDIO_CHANNELS, PATCH = 24, 32, 4
INV_FREQ = 16  # three axes of 2 * 16 rotated channels = 96 of the 128
TIME_IN, TIME_HIDDEN, TIME_DIM = 256, 256, 128
CURVE_GRID, CURVE_DIM = 1025, 8  # the shipped pruned files have an adaLN table of [1025, 8]

QUANTS = ("bf16", "nvfp4", "int8_convrot", "fp8_scaled")
FORMATS = QUANTS + tuple("pruned_" + quant for quant in QUANTS)
QUANTIZED_LAYERS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
CONVROT_GROUP = 256
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def write_tiny_models(models_dir, seed=0, formats=FORMATS, text_encoder=True, vaes=True):
    """Write the files under ``models_dir`` (a ComfyUI ``models`` folder) and return their paths.

    Args:
        models_dir: folder that gets ``diffusion_models/``, ``text_encoders/`` and ``vae/``.
        seed: the same seed writes the same bytes.
        formats: which DiTs, names from :data:`FORMATS`: a storage (``bf16``, ``nvfp4``, ``int8_convrot``,
            ``fp8_scaled``), with ``pruned_`` in front for the form that carries an adaLN curve table.
        text_encoder: also write the 50-layer Qwen3-VL (25 MB; reading it costs ComfyUI half a minute on two cores).
        vaes: also write the video VAE (8 MB) and the audio VAE (1.5 MB).

    Returns:
        ``{name: path}`` with a name per format, and ``text_encoder``, ``video_vae``, ``audio_vae``.

    Raises:
        ValueError: a name in ``formats`` is unknown.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown tiny format {unknown[0]!r}: choose from {', '.join(FORMATS)}")
    from safetensors.torch import save_file

    from . import tiny_thin

    root = Path(models_dir)
    paths = {}
    for name in formats:
        paths[name] = _place(root, "diffusion_models", f"minimax_h3_tiny_{name}.safetensors")
        save_file(dit_state_dict(name, seed), paths[name])
    thin = []
    if vaes:
        thin.append(("video_vae", "vae", "minimax_h3_video_vae_thin.pt", tiny_thin.video_vae))
        thin.append(("audio_vae", "vae", "minimax_h3_audio_vae_thin.pt", tiny_thin.audio_vae))
    if text_encoder:
        thin.append(("text_encoder", "text_encoders", "qwen3vl_32b_minimax_h3_thin.pt", tiny_thin.text_encoder))
    for name, folder, filename, build in thin:
        paths[name] = _place(root, folder, filename)
        torch.save(build(generator(name, seed)), paths[name])
    return paths


def generator(name, seed):
    """A CPU generator whose stream depends on ``name`` and ``seed`` alone."""
    return torch.Generator("cpu").manual_seed(zlib.crc32(f"{name}/{seed}".encode()))


def _place(root, folder, filename):
    (root / folder).mkdir(parents=True, exist_ok=True)
    return root / folder / filename


def dit_state_dict(format_name, seed=0):
    """State dict of the tiny DiT in one of :data:`FORMATS`.

    Every storage of one form is made of the same bf16 weights, so their outputs differ by quantisation alone.
    """
    pruned = format_name.startswith("pruned_")
    quant = format_name.removeprefix("pruned_")
    weights = _bf16_state_dict(generator("dit_pruned" if pruned else "dit", seed), pruned)
    if quant == "bf16":
        return weights
    return quantize_blocks(weights, {"nvfp4": nvfp4, "int8_convrot": _int8_convrot, "fp8_scaled": _fp8_scaled}[quant])


def _bf16_state_dict(gen, pruned):
    sd = {}
    inner, patch_channels = HEADS * HEAD_DIM, LATENT_CHANNELS * PATCH
    bf16, fp32 = torch.bfloat16, torch.float32

    def normal(*shape, std):
        return torch.randn(*shape, generator=gen) * std

    def linear(name, out, width, bias=False, dtype=bf16):
        sd[name + ".weight"] = normal(out, width, std=width**-0.5).to(dtype)
        if bias:
            sd[name + ".bias"] = normal(out, std=0.02).to(dtype)

    def norm(name, width):
        sd[name + ".weight"] = (1 + normal(width, std=0.05)).to(bf16)

    def block(prefix):
        norm(prefix + "norm1", HIDDEN)
        norm(prefix + "norm2", HIDDEN)
        linear(prefix + "attn.qkv_proj", 3 * inner, HIDDEN)
        norm(prefix + "attn.q_norm", HEAD_DIM)
        norm(prefix + "attn.k_norm", HEAD_DIM)
        linear(prefix + "attn.out_proj", HIDDEN, inner)
        linear(prefix + "mlp.fc1", 2 * FFN, HIDDEN)
        linear(prefix + "mlp.fc2", HIDDEN, FFN)

    # the checkpoint's fp32 islands: patch projections, time embedder, heads, and the adaLN of the pruned form
    linear("video_patch_proj", HIDDEN, patch_channels, True, fp32)
    linear("audio_patch_proj", HIDDEN, AUDIO_CHANNELS, True, fp32)
    linear("condition_proj", HIDDEN, TEXT_DIM, True)
    if pruned:
        time_dim, adaln_dtype = CURVE_DIM, fp32
        sd["adaln_t_table"] = _curve_table(normal(CURVE_DIM, CURVE_DIM, std=CURVE_DIM**-0.5))
    else:
        time_dim, adaln_dtype = TIME_DIM, bf16
        linear("time_embedder.proj_in", TIME_HIDDEN, TIME_IN, True, fp32)
        linear("time_embedder.proj_out", TIME_DIM, TIME_HIDDEN, True, fp32)
    sd["rope.inv_freq"] = 10000.0 ** -(torch.arange(INV_FREQ, dtype=fp32) / INV_FREQ)
    for i in range(REFINER_LAYERS):
        block(f"token_refiner.blocks.{i}.")
    norm("token_refiner.final_norm", HIDDEN)
    for i in range(LAYERS):
        block(f"blocks.{i}.")
        linear(f"blocks.{i}.adaln_proj.linear", 6 * HIDDEN * 3, time_dim, True, adaln_dtype)
    norm("final_layer.norm", HIDDEN)
    linear("final_layer.adaln_proj.linear", 2 * HIDDEN, time_dim, True, adaln_dtype)
    linear("final_layer.video_out", patch_channels, HIDDEN, True, fp32)
    linear("final_layer.audio_out", AUDIO_CHANNELS, HIDDEN, True, fp32)
    return sd


def _curve_table(mix):
    """A smooth random curve over t in [0, 1]: ``mix`` [k, k] applied to k cosines, on ``CURVE_GRID`` points."""
    t = torch.linspace(0, 1, CURVE_GRID, dtype=torch.float32)
    waves = torch.cos(math.pi * t[:, None] * torch.arange(CURVE_DIM, dtype=torch.float32)[None])
    return (waves @ mix).contiguous()


def comfy_quant(conf):
    """The ``<layer>.comfy_quant`` tensor by which ComfyUI knows how a layer is stored: JSON as uint8."""
    return torch.tensor(list(json.dumps(conf).encode()), dtype=torch.uint8)


def quantize_blocks(weights, quantize):
    """Replace the four Linears of every DiT block by what ``quantize(weight)`` returns as ``{suffix: tensor}``."""
    out = {}
    for key, value in weights.items():
        layer = key.removesuffix(".weight")
        if key.startswith("blocks.") and key.endswith(".weight") and layer.endswith(QUANTIZED_LAYERS):
            out.update({f"{layer}.{suffix}": tensor.contiguous() for suffix, tensor in quantize(value).items()})
        else:
            out[key] = value
    return out


def nvfp4(weight):
    """``{suffix: tensor}`` of a Linear ``weight`` [N, K] stored as NVFP4: as the official files hold it, without an input scale."""
    import comfy_kitchen

    tensor_scale = (weight.float().abs().amax() / (E4M3_MAX * E2M1_MAX)).to(torch.float32)
    data, block_scale = comfy_kitchen.quantize_nvfp4(weight, tensor_scale, pad_16x=False)
    return {
        "weight": data,
        "weight_scale": block_scale,
        "weight_scale_2": tensor_scale,
        "comfy_quant": comfy_quant({"format": "nvfp4"}),
    }


def _int8_convrot(weight):
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    data, params = TensorWiseINT8Layout.quantize(weight.float(), per_channel=True, convrot=True, convrot_groupsize=CONVROT_GROUP)
    conf = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": CONVROT_GROUP}
    return {"weight": data, "weight_scale": params.scale, "comfy_quant": comfy_quant(conf)}


def _fp8_scaled(weight):
    scale = (weight.float().abs().amax() / E4M3_MAX).to(torch.float32)
    data = (weight.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale, "comfy_quant": comfy_quant({"format": "float8_e4m3fn"})}

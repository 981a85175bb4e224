"""What a checkpoint file is, read from its header: complete or cut short, which H3 part, how each layer is stored.

Only headers and the few bytes of the ``comfy_quant`` tensors are read, never the weights.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

DIFFUSION_MODEL, TEXT_ENCODER, VIDEO_VAE, AUDIO_VAE = "diffusion_model", "text_encoder", "video_vae", "audio_vae"
NAMES = {
    DIFFUSION_MODEL: "an H3 diffusion model",
    TEXT_ENCODER: "the H3 text encoder (Qwen3-VL 32B, 50 layers)",
    VIDEO_VAE: "an H3 video VAE",
    AUDIO_VAE: "an H3 audio VAE",
}
# The keys by which ComfyUI knows each part (comfy/model_detection.py, comfy/sd.py).
_SIGNATURES = {
    VIDEO_VAE: ("decoder.transformer_blocks.0.scale1", "encoder.down.5.block.0.conv1.weight"),
    AUDIO_VAE: ("pre_block.attn.zero_k_bias",),
    TEXT_ENCODER: ("visual.deepstack_merger_list.0.norm.weight", "model.layers.49.self_attn.q_proj.weight"),
}
_DIT_KEYS = ("video_patch_proj.weight", "audio_patch_proj.weight")
_DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
_TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
QUANT = ".comfy_quant"
_MAX_HEADER = 100_000_000


class CheckpointError(ValueError):
    """A file that cannot be used where it was put. The message names it and the way out."""


@dataclass
class Header:
    """Names, dtypes and shapes of a file's tensors. ``quant``: {layer: its ``comfy_quant`` configuration}."""

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    quant: dict[str, dict] = field(default_factory=dict)

    @property
    def gigabytes(self):
        return self.path.stat().st_size / 1e9


def read_header(path):
    """Read a ``.safetensors`` or PyTorch file's :class:`Header`.

    Raises:
        CheckpointError: the file is truncated or is not what its name says.
    """
    path = Path(path)
    if path.suffix.lower() in (".safetensors", ".sft"):
        return _read_safetensors(path)
    return _read_torch(path)


def _read_safetensors(path):
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path.name} is truncated: it has {size} bytes; download it again")
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_HEADER:
            raise CheckpointError(f"{path.name} is not a safetensors file (a web page saved under this name?)")
        if 8 + length > size:
            raise CheckpointError(f"{path.name} is truncated: its header alone has {8 + length} bytes, the file {size}; download it again")
        try:
            entries = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path.name} has a damaged header ({error}); download it again") from error
        metadata = entries.pop("__metadata__", {}) if isinstance(entries, dict) else None
        if not isinstance(metadata, dict) or not all(map(_is_entry, entries.values())):
            raise CheckpointError(f"{path.name} has a damaged header (it does not list tensors); download it again")
        promised = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if promised > size:
            raise CheckpointError(f"{path.name} is truncated: header promises {promised} bytes, file has {size}; download it again")
        whole = "all layers"
        quant = _configurations(path, {whole: metadata.get("_quantization_metadata", "{}")})[whole].get("layers", {})
        if not isinstance(quant, dict) or not all(isinstance(conf, dict) for conf in quant.values()):
            raise CheckpointError(f"{path.name}: its _quantization_metadata does not list layers: the file is damaged; download it again")
        texts = {}
        for name, entry in entries.items():
            if name.endswith(QUANT):
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                texts[name.removesuffix(QUANT)] = file.read(end - begin)
        quant |= _configurations(path, texts)
    return Header(path, {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}, quant)


def _is_entry(entry):
    """Is this how a safetensors header describes one tensor?"""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    return lists and all(type(n) is int and n >= 0 for n in (*shape, *offsets)) and offsets[0] <= offsets[1]


def _configurations(path, texts):
    """``{layer: configuration}`` of the JSON objects by which layers say how they are quantised."""
    found = {}
    for layer, text in texts.items():
        try:
            found[layer] = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path.name}: the quantisation of {layer} cannot be read ({error}); download it again") from error
        if not isinstance(found[layer], dict):
            raise CheckpointError(f"{path.name}: the quantisation of {layer} is no JSON object: the file is damaged; download it again")
    return found


def _read_torch(path):
    import torch

    try:
        # weights_only: no code in the file can run; mmap: the weights stay on the disk
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the reader of a damaged file raises whatever it met: KeyError, IndexError, struct.error, ..
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path.name} cannot be read as a PyTorch file, it is truncated or something else ({reason}); download it again"
        ) from error
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else {}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)} if isinstance(state, dict) else {}
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path.name} holds no tensors by name: it is not a checkpoint")
    texts = {}
    for name, value in tensors.items():
        if name.endswith(QUANT):
            texts[name.removesuffix(QUANT)] = value.flatten().to(torch.uint8).numpy().tobytes()
    quant = _configurations(path, texts)
    shapes = {}
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        shapes[name] = (_TORCH_DTYPES.get(dtype, dtype.upper()), tuple(value.shape))
    return Header(path, shapes, quant)


def kind(header):
    """Which H3 part the file is: one of the four slot names, or None."""
    for name, keys in _SIGNATURES.items():
        if all(key in header.tensors for key in keys):
            return name
    prefix = _dit_prefix(header)
    if prefix is not None and prefix + _DIT_KEYS[1] in header.tensors:
        return DIFFUSION_MODEL
    return None


def check_slot(header, slot):
    """Raise :class:`CheckpointError` unless the file belongs in ``slot``, one of the four slot names."""
    found = kind(header)
    if found == slot:
        return
    if found is not None:
        raise CheckpointError(f"{slot}: {header.path.name!r} is {NAMES[found]}, put it in {found}")
    if any(".lora_" in name for name in header.tensors):
        raise CheckpointError(f"{slot}: {header.path.name!r} is a LoRA, not {NAMES[slot]}: load it with a LoRA node after H3 Load")
    first = ", ".join(list(header.tensors)[:3])
    raise CheckpointError(
        f"{slot}: {header.path.name!r} is not {NAMES[slot]} (its {len(header.tensors)} tensors begin with {first}): "
        f"choose a MiniMax H3 file"
    )


def _dit_prefix(header):
    for name in header.tensors:
        if name.endswith(_DIT_KEYS[0]):
            return name.removesuffix(_DIT_KEYS[0])
    return None


def layer_format(header, layer):
    """How the Linear ``layer`` is stored: ``nvfp4``, ``int8_convrot``, ``fp8_scaled``, .. or its dtype."""
    conf = header.quant.get(layer)
    if conf is None:
        dtype = header.tensors[layer + ".weight"][0]
        return _DTYPES.get(dtype, dtype.lower())
    name = conf.get("format", "unknown")
    if name == "int8_tensorwise":
        return "int8_convrot" if conf.get("convrot", conf.get("params", {}).get("convrot")) else "int8"
    return {"float8_e4m3fn": "fp8_scaled", "float8_e5m2": "fp8_e5m2_scaled"}.get(name, name)


def formats(header):
    """``{layer kind: {format: count}}`` of the weight matrices; indices of blocks are dropped from the layer's name."""
    kinds = {}
    for name, (_, shape) in header.tensors.items():
        if name.endswith(".weight") and len(shape) >= 2:
            layer = name.removesuffix(".weight")
            kinds.setdefault(re.sub(r"\.\d+", "", layer), Counter())[layer_format(header, layer)] += 1
    return kinds


def cuda_warning(header, torch_version, cuda):
    """One line when ComfyUI leaves comfy-kitchen's CUDA kernels off for layers that the file has, or None.

    Args:
        torch_version: ``torch.__version__``.
        cuda: ``torch.version.cuda``, the CUDA version that torch was built for, or None. Below 13.0 ComfyUI disables those kernels
            (comfy/quant_ops.py).
    """
    if cuda is None or tuple(map(int, cuda.split("."))) >= (13,):
        return None
    stored = {name for counts in formats(header).values() for name in counts} & {"int8_convrot", "nvfp4"}
    if not stored:
        return None
    return (
        f"warning: {header.path.name} has {' and '.join(sorted(stored))} layers, and torch {torch_version} is built for CUDA {cuda}: "
        "below 13.0 ComfyUI leaves comfy-kitchen's CUDA kernels off, and noise was reported; install a torch for CUDA 13.0 or newer"
    )


def describe(header):
    """A few lines on one file: what it is, its size, how its layers are stored."""
    found = kind(header)
    head = f"{found or 'unknown'} {header.path.name}: {header.gigabytes:.3g} GB"
    if found != DIFFUSION_MODEL:
        total = Counter()
        for counts in formats(header).values():
            total += counts
        return f"{head}, layers: {_counts(total)}"
    prefix = _dit_prefix(header)
    pattern = re.compile(re.escape(prefix) + r"blocks\.(\d+)\.")
    blocks = len({match.group(1) for match in map(pattern.match, header.tensors) if match})
    width = header.tensors[prefix + _DIT_KEYS[0]][1][0]
    table = header.tensors.get(prefix + "adaln_t_table")
    form = f"pruned (adaLN curve {list(table[1])})" if table else "full (time embedder)"
    lines = [f"{head}, {form}, {blocks} blocks of width {width}"]
    rest = Counter()
    for layer, counts in formats(header).items():
        name = layer.removeprefix(prefix)
        if name.startswith("blocks."):
            lines.append(f"  {name.removeprefix('blocks.')}: {_counts(counts)}")
        else:
            rest += counts
    return "\n".join([*lines, f"  elsewhere: {_counts(rest)}"])


def _counts(counter):
    return ", ".join(f"{name} x{count}" for name, count in counter.most_common())

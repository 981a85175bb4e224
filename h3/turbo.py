"""LoRA files for MiniMax H3, in every key form that is in circulation, as low-rank pairs in ComfyUI's layer names and row order.

The forms differ in three places only:

* names: ComfyUI's (``diffusion_model.blocks.0.attn.qkv_proj``), the same without a prefix, diffusers' (``transformer_blocks.0.attn.to_q``,
  ``ff.net.0.proj``), and flattened ones (``lora_unet_blocks_0_attn_qkv_proj``); ``lora_A``/``lora_B`` or ``lora_down``/``lora_up``, with or
  without peft's ``.default``;
* rows: diffusers keeps q, k and v apart and stacks ``[value; gate]`` in the first MLP layer where ComfyUI has ``[gate; value]``;
  files with ``.default`` over ComfyUI's names hold the rows of a fused q/k/v head by head, as the original shards do;
* alpha: a tensor per layer, a number in the file's metadata, or nowhere.

Nothing here computes with the model; :class:`Adapter` is what is applied beside a layer.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace

import torch

HEAD_DIM = 128  # of every released H3
LAYER = re.compile(
    r"(token_refiner\.)?blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])|blocks\.\d+\.adaln_proj\.linear|final_layer\.(adaln_proj\.linear|video_out|audio_out)"
    r"|(video|audio)_patch_proj|condition_proj|time_embedder\.proj_(in|out)"
)
KEY = re.compile(r"(?P<layer>.+?)\.(?P<kind>lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up|alpha)(?P<default>\.default)?(\.weight)?")
PREFIX = re.compile(r"(base_model\.model\.|model\.(?=diffusion_model\.)|diffusion_model\.|transformer(_ref)?\.)")
DOWN = {"lora_A", "lora_down", "lora.down"}
# diffusers' layers -> ComfyUI's
RENAMED = (
    (re.compile(r"^transformer_blocks\."), "blocks."),
    (re.compile(r"^token_refiner\.refiner_blocks\."), "token_refiner.blocks."),
    (re.compile(r"\.attn\.to_out\.0$"), ".attn.out_proj"),
    (re.compile(r"\.ff\.net\.2$"), ".mlp.fc2"),
    (re.compile(r"^norm_out\.linear$"), "final_layer.adaln_proj.linear"),
    (re.compile(r"^proj_out$"), "final_layer.video_out"),
    (re.compile(r"^audio_proj_out$"), "final_layer.audio_out"),
    (re.compile(r"^proj_in$"), "video_patch_proj"),
    (re.compile(r"^audio_proj_in$"), "audio_patch_proj"),
    (re.compile(r"^context_embedder$"), "condition_proj"),
    (re.compile(r"^time_embedder\.linear_1$"), "time_embedder.proj_in"),
    (re.compile(r"^time_embedder\.linear_2$"), "time_embedder.proj_out"),
)
FLATTENED = (
    (re.compile(r"^(token_refiner_)?blocks_(\d+)_"), lambda m: f"{'token_refiner.' if m[1] else ''}blocks.{m[2]}."),
    (re.compile(r"(^|\.)attn_(qkv|out)_proj$"), r"\1attn.\2_proj"),
    (re.compile(r"(^|\.)mlp_fc([12])$"), r"\1mlp.fc\2"),
    (re.compile(r"(^|\.)adaln_proj_linear$"), r"\1adaln_proj.linear"),
    (re.compile(r"^final_layer_adaln_proj_linear$"), "final_layer.adaln_proj.linear"),
    (re.compile(r"^final_layer_(video|audio)_out$"), r"final_layer.\1_out"),
    (re.compile(r"^time_embedder_proj_(in|out)$"), r"time_embedder.proj_\1"),
)


class LoraError(ValueError):
    """A file that is not a LoRA for MiniMax H3, or is damaged; the message says which key and what was expected."""


@dataclass(frozen=True)
class Adapter:
    """What one layer gets: rows ``spans[j]`` of its output take ``scales[j] * up[spans[j]] @ (down_j @ x + bias_j)``.

    ``down`` is ``[groups * r, in]``, ``up`` ``[out, r]``; ``down_j`` are rows ``[j r, (j + 1) r)``. One group is an ordinary LoRA; a fused
    q/k/v of three independent LoRAs has three: its block-diagonal form without the zeros. ``scales`` are ``alpha / rank``, no strength.
    """

    down: torch.Tensor
    up: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    scales: tuple[float, ...]
    bias: torch.Tensor | None = None

    @property
    def rank(self):
        """Rank as a fused file counts it: of all groups together."""
        return self.down.shape[0]

    @property
    def width(self):
        """Rank of one group."""
        return self.up.shape[1]

    @property
    def shape(self):
        """``(out, in)`` of the layer."""
        return self.up.shape[0], self.down.shape[1]

    def dense(self, dtype=torch.float64):
        """``[out, in]``: what the layer's weight would gain if it were merged."""
        delta = torch.zeros(self.shape, dtype=dtype)
        for j, ((start, stop), scale) in enumerate(zip(self.spans, self.scales, strict=True)):
            down = self.down[j * self.width : (j + 1) * self.width].to(dtype)
            delta[start:stop] = scale * (self.up[start:stop].to(dtype) @ down)
        return delta


@dataclass
class Lora:
    """A LoRA file as read: ``adapters`` by ComfyUI's layer name, its key ``form``, where ``alpha`` came from, ``unused`` keys."""

    adapters: dict[str, Adapter]
    form: str
    alpha_from: str
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ranks(self):
        return sorted({adapter.rank for adapter in self.adapters.values()})

    def scales(self):
        return sorted({scale for adapter in self.adapters.values() for scale in adapter.scales})

    def describe(self):
        """``208 modules, rank 128/384, scale 0.0625``"""
        ranks, scales = ("/".join(f"{value:g}" for value in values) for values in (self.ranks(), self.scales()))
        return f"{len(self.adapters)} modules, rank {ranks}, scale {scales}"


@dataclass
class _Pair:
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    alpha: float | None = None


def read(tensors, metadata=None, fallback_alpha=None):
    """A :class:`Lora` from the tensors of a file.

    Args:
        tensors: ``{key: tensor}`` of the file.
        metadata: the file's ``__metadata__``, ``{str: str}``.
        fallback_alpha: alpha per group of a file that names none itself (from the table of known files), or None for alpha = rank.

    Raises:
        LoraError: no key names an H3 layer, half of a pair is missing, or shapes do not fit together.
    """
    pairs, unused, forms = _collect(tensors)
    if not pairs:
        sample = next(iter(tensors), "none at all")
        raise LoraError(
            f"the file has no key of a MiniMax H3 LoRA (its first key: {sample}). Expected names such as "
            "diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight or transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
        )
    stated, source = _stated_scale(metadata or {})
    lora = Lora({}, "+".join(sorted(forms)), "alpha tensors", unused)
    sources = set()
    for layer, parts in pairs.items():
        for part, pair in parts.items():
            _check_pair(layer, part, pair)

        def scale(pair, groups=1, where=sources):
            rank = pair.down.shape[0]
            if pair.alpha is not None:
                where.add("alpha tensors")
                return pair.alpha / rank
            if stated is not None:
                where.add(source)
                return stated(rank // groups)
            if fallback_alpha is not None:
                where.add("the table of known files (the file names no alpha)")
                return fallback_alpha / (rank // groups)
            where.add("nowhere: alpha = rank was assumed")
            return 1.0

        lora.adapters[layer] = _adapter(layer, parts, "DiffSynth" in forms, scale)
    lora.alpha_from = " and ".join(sorted(sources))
    if "DiffSynth" in forms:
        lora.notes.append("rows of the fused q/k/v were put from head by head into q, k, v")
    lora.adapters = dict(sorted(lora.adapters.items()))
    return lora


def _collect(tensors):
    """({layer: {part: _Pair}}, keys that belong to nothing, key forms) of a file."""
    pairs, unused, forms = {}, [], set()
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        found = _layer(match["layer"]) if match else None
        if found is None:
            unused.append(key)
            continue
        layer, part, form = found
        if match["default"] and form != "diffusers" and layer.endswith("qkv_proj"):
            form = "DiffSynth"
        forms.add(form)
        pair = pairs.setdefault(layer, {}).setdefault(part, _Pair())
        if match["kind"] == "alpha":
            if tensor.numel() != 1 or tensor.is_complex() or not math.isfinite(tensor.item()):
                raise LoraError(f"{key} holds {tensor.numel()} values of {tensor.dtype}, expected one finite number")
            pair.alpha = float(tensor.item())
        elif match["kind"] in DOWN:
            pair.down = tensor
        else:
            pair.up = tensor
    return pairs, unused, forms


def _layer(name):
    """(ComfyUI's layer, part, form) of a key's layer name; None when it is no layer of H3. Parts: ``""``, q, k, v, ``value_gate``."""
    flat = re.fullmatch(r"lora_(?:unet|transformer)_(.+)", name)
    if flat:
        path = flat[1]
        for pattern, text in FLATTENED:
            path = pattern.sub(text, path)
        return (path, "", "flattened") if LAYER.fullmatch(path) else None
    bare = name
    while (prefix := PREFIX.match(bare)) is not None:
        bare = bare[prefix.end() :]
    if LAYER.fullmatch(bare):
        return bare, "", "native" if bare == name else "ComfyUI"
    for pattern, text in RENAMED:
        bare = pattern.sub(text, bare)
    part = ""
    if (separate := re.fullmatch(r"(.+\.attn)\.to_([qkv])", bare)) is not None:
        bare, part = f"{separate[1]}.qkv_proj", separate[2]
    elif (first := re.fullmatch(r"(.+)\.ff\.net\.0\.proj", bare)) is not None:
        bare, part = f"{first[1]}.mlp.fc1", "value_gate"
    return (bare, part, "diffusers") if LAYER.fullmatch(bare) else None


def _check_pair(layer, part, pair):
    name = f"{layer} ({part})" if part else layer
    if pair.down is None or pair.up is None:
        raise LoraError(f"{name} has only one half of its pair ({'A' if pair.down is not None else 'B'}): the file is damaged or cut")
    if pair.down.dim() != 2 or pair.up.dim() != 2 or pair.up.shape[1] != pair.down.shape[0]:
        raise LoraError(f"{name} has A {list(pair.down.shape)} and B {list(pair.up.shape)}: expected [rank, in] and [out, rank]")
    if 0 in pair.down.shape or 0 in pair.up.shape:
        raise LoraError(f"{name} has A {list(pair.down.shape)} and B {list(pair.up.shape)}: nothing is in them, the file is damaged")
    for letter, half in (("A", pair.down), ("B", pair.up)):
        if not half.is_floating_point():
            raise LoraError(f"{name}: {letter} is {half.dtype}, expected floating point numbers")


def _adapter(layer, parts, interleaved, scale):
    if set(parts) <= {"q", "k", "v"}:
        return _fuse_qkv(layer, parts, scale)
    if len(parts) > 1:
        raise LoraError(f"{layer} comes twice, in two key forms ({', '.join(sorted(parts))}): the file is a mixture")
    (part, pair), = parts.items()
    down, up = pair.down, pair.up
    if part == "value_gate":
        if up.shape[0] % 2:
            raise LoraError(f"{layer} has {up.shape[0]} output rows, expected the two halves of a SwiGLU")
        up = torch.cat(up.chunk(2)[::-1])
    if layer.endswith("qkv_proj"):
        if up.shape[0] % 3:
            raise LoraError(f"{layer} has {up.shape[0]} output rows, expected the thirds of a fused q/k/v")
        if interleaved:
            if up.shape[0] % (3 * HEAD_DIM):
                raise LoraError(f"{layer} has {up.shape[0]} output rows, expected heads of 3 x {HEAD_DIM}")
            up = up.unflatten(0, (-1, 3, HEAD_DIM)).transpose(0, 1).flatten(0, 2)
        blocks = _diagonal_blocks(up)
        if blocks is not None:
            third = up.shape[0] // 3
            spans = tuple((j * third, (j + 1) * third) for j in range(3))
            return Adapter(down, torch.cat(blocks), spans, (scale(pair, groups=3),) * 3)
    return Adapter(down, up.contiguous(), ((0, up.shape[0]),), (scale(pair),))


def _diagonal_blocks(up):
    """The three blocks of a block-diagonal ``[3 n, 3 r]``, or None when it is not one. Zeros outside add exactly nothing."""
    rows, columns = up.shape
    if columns % 3:
        return None
    grid = up.unflatten(0, (3, rows // 3)).unflatten(2, (3, columns // 3))
    if any(bool(grid[a, :, b].any()) for a in range(3) for b in range(3) if a != b):
        return None
    return [grid[j, :, j] for j in range(3)]


def _fuse_qkv(layer, parts, scale):
    missing = sorted({"q", "k", "v"} - set(parts))
    if missing:
        raise LoraError(f"{layer} has no pair for {', '.join(missing)}: all three of to_q, to_k and to_v are expected")
    pairs = [parts[name] for name in "qkv"]
    if len({tuple(p.down.shape) for p in pairs}) > 1 or len({tuple(p.up.shape) for p in pairs}) > 1:
        raise LoraError(f"{layer}: to_q, to_k and to_v have different shapes, expected the same rank and width")
    third = pairs[0].up.shape[0]
    spans = tuple((j * third, (j + 1) * third) for j in range(3))
    return Adapter(torch.cat([p.down for p in pairs]), torch.cat([p.up for p in pairs]), spans, tuple(scale(p) for p in pairs))


def _stated_scale(metadata):
    """(``rank of a group -> scale``, where it is stated) from a file's metadata, or (None, None)."""
    def number(name):
        try:
            value = float(metadata[name])
        except (KeyError, TypeError, ValueError):
            return None
        return value if math.isfinite(value) else None

    if (value := number("training_scale")) is not None:
        return (lambda rank: value), "metadata (training_scale)"
    for name in ("training_alpha", "alpha", "lora_alpha", "ss_network_alpha"):
        if (value := number(name)) is not None:
            return (lambda rank: value / rank), f"metadata ({name})"
    if "lora_adapter_metadata" in metadata:
        try:
            config = json.loads(metadata["lora_adapter_metadata"])
        except (ValueError, RecursionError) as error:
            raise LoraError(f"the file's lora_adapter_metadata is not JSON: {error}") from error
        for name, value in config.items() if isinstance(config, dict) else ():
            if name.rsplit(".", 1)[-1] == "lora_alpha" and type(value) in (int, float) and math.isfinite(value):
                return (lambda rank, alpha=value: alpha / rank), f"metadata ({name})"
    return None, None


# -- against a model -----------------------------------------------------------------------------------------------------------------


@dataclass
class Match:
    """``adapters`` that fit the model; layers ``absent`` from it; ``unfit`` ones with their shapes in words; AdaLN pairs of full width."""

    adapters: dict[str, Adapter]
    absent: list[str]
    unfit: dict[str, str]
    full_adaln: dict[str, Adapter]


def match(lora, shapes, curve_width=None):
    """Compare with the layers of a model.

    Args:
        lora: :class:`Lora`.
        shapes: ``{layer: (out, in)}`` of the model's Linears.
        curve_width: width of the AdaLN curve table of a pruned checkpoint, None for a full one.

    Raises:
        LoraError: nothing fits.
    """
    found = Match({}, [], {}, {})
    for layer, adapter in lora.adapters.items():
        if layer not in shapes:
            found.absent.append(layer)
        elif tuple(shapes[layer]) == adapter.shape:
            found.adapters[layer] = adapter
        elif curve_width is not None and layer.endswith("adaln_proj.linear") and shapes[layer][0] == adapter.shape[0]:
            found.full_adaln[layer] = adapter
        else:
            found.unfit[layer] = f"LoRA {list(adapter.shape)}, model {list(shapes[layer])}"
    if not found.adapters and not found.full_adaln:
        detail = next(iter(found.unfit.items()), None)
        why = f"{detail[0]}: {detail[1]}" if detail else f"the model has no layer {found.absent[0]}"
        raise LoraError(f"none of the file's {len(lora.adapters)} modules fits this model ({why}): it was made for another model")
    return found


def in_curve_basis(adapter, fit):
    """``adapter`` of an AdaLN layer with its ``down`` (and a bias) replaced by ``fit``: see :mod:`.adaln`."""
    return replace(adapter, down=fit.down, bias=fit.bias)

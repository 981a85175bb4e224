"""Turbo LoRA files: every key form against the float64 dense delta, alpha from wherever it is stated, AdaLN in a curve basis."""

import json
import re

import pytest
import torch
from h3_vortex.h3 import adaln, turbo
from h3_vortex.tests.host import turbo_file

HIDDEN, HEADS, FFN, RANK = 256, 2, 384, 4
INNER = HEADS * 128
SHAPES = {
    f"{prefix}.{layer}": shape
    for prefix in ("blocks.0", "blocks.1", "token_refiner.blocks.0")
    for layer, shape in (
        ("attn.qkv_proj", (3 * INNER, HIDDEN)), ("attn.out_proj", (HIDDEN, INNER)),
        ("mlp.fc1", (2 * FFN, HIDDEN)), ("mlp.fc2", (HIDDEN, FFN)))
}  # fmt: skip


def dense(tensors, scale, source="diffusers"):
    """Float64 delta per ComfyUI layer, from the definition: q, k and v stacked, [value; gate] turned into [gate; value]."""
    def delta(name):
        down, up = (tensors[f"transformer.{name}.lora_{letter}.weight"].double() for letter in "AB")
        return scale * up @ down

    out = {}
    for layer in SHAPES:
        base = layer.rpartition(".")[0].removesuffix(".attn").removesuffix(".mlp")
        base = base.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.") if base.startswith("token") else f"transformer_{base}"
        if layer.endswith("qkv_proj"):
            out[layer] = torch.cat([delta(f"{base}.attn.to_{part}") for part in "qkv"])
        elif layer.endswith("fc1"):
            value, gate = delta(f"{base}.ff.net.0.proj").chunk(2)
            out[layer] = torch.cat([gate, value])
        else:
            out[layer] = delta(base + (".attn.to_out.0" if layer.endswith("out_proj") else ".ff.net.2"))
    return out


def agree(lora, expected):
    assert set(lora.adapters) == set(expected)
    for layer, adapter in lora.adapters.items():
        assert torch.allclose(adapter.dense(), expected[layer], rtol=1e-12, atol=1e-15), layer


def renamed(tensors, change):
    return {change(key): value for key, value in tensors.items()}


SOURCE = turbo_file.diffusers_tensors(SHAPES, rank=RANK, alpha=8)
COMFY = turbo_file.comfy_tensors(SHAPES, rank=RANK, alpha=8)
EXPECTED = dense(SOURCE, 8 / RANK)


def native(key):
    return key.removeprefix("diffusion_model.")


def kohya(key):
    return native(key).replace("lora_A", "lora_down").replace("lora_B", "lora_up")


def flattened(key):
    layer, suffix = re.fullmatch(r"(.+?)\.((?:lora_|alpha).*)", kohya(key)).groups()
    return f"lora_unet_{layer.replace('.', '_')}.{suffix}"


@pytest.mark.parametrize(
    "tensors, form",
    [
        (SOURCE, "diffusers"),
        (renamed(SOURCE, lambda key: key.removeprefix("transformer.")), "diffusers"),
        (renamed(SOURCE, lambda key: "base_model.model." + key), "diffusers"),
        (renamed(SOURCE, lambda key: key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")), "diffusers"),
        (COMFY, "ComfyUI"),
        (renamed(COMFY, lambda key: "model." + key), "ComfyUI"),
        (renamed(COMFY, native), "native"),
        (renamed(COMFY, kohya), "native"),
        (renamed(COMFY, flattened), "flattened"),
    ],
    ids=["diffusers", "no prefix", "peft", "default", "comfyui", "model prefix", "native", "down and up", "flattened"],
)
def test_every_key_form_is_the_same_delta(tensors, form):
    lora = turbo.read(tensors)
    agree(lora, EXPECTED)
    assert lora.form == form and lora.alpha_from == "alpha tensors" and not lora.unused
    assert lora.scales() == [2.0] and "12 modules, rank 4/12, scale 2" == lora.describe()


def test_rows_head_by_head_are_put_in_order():
    tensors = {}
    for key, value in turbo_file.comfy_tensors(SHAPES, rank=RANK).items():
        if "qkv_proj.lora_B" in key:
            value = value.unflatten(0, (3, HEADS, 128)).transpose(0, 1).flatten(0, 2)
        tensors[native(key).replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")] = value
    lora = turbo.read(tensors)
    agree(lora, dense(turbo_file.diffusers_tensors(SHAPES, rank=RANK), 1.0))
    assert lora.form == "DiffSynth+native" and lora.notes


def test_conversion_round_trips_through_diffusers():
    loaders = pytest.importorskip("diffusers.loaders.lora_conversion_utils")
    for source in (COMFY, renamed(COMFY, native), renamed(COMFY, flattened)):
        there = loaders._convert_non_diffusers_minimax_h3_lora_to_diffusers(dict(source))
        lora = turbo.read(there)  # diffusers folds alpha into the pairs, in powers of two
        assert lora.form == "diffusers"
        for layer, adapter in lora.adapters.items():
            assert torch.allclose(adapter.dense(), EXPECTED[layer], rtol=1e-5, atol=1e-7), layer


def test_block_diagonal_is_stored_without_its_zeros():
    adapter = turbo.read(COMFY).adapters["blocks.0.attn.qkv_proj"]
    assert adapter.rank == 3 * RANK and adapter.width == RANK and adapter.up.shape == (3 * INNER, RANK)
    assert adapter.spans == ((0, INNER), (INNER, 2 * INNER), (2 * INNER, 3 * INNER))
    shared = dict(COMFY)
    key = "diffusion_model.blocks.0.attn.qkv_proj.lora_B.weight"
    shared[key] = torch.randn(3 * INNER, 3 * RANK)
    adapter = turbo.read(shared).adapters["blocks.0.attn.qkv_proj"]
    assert adapter.width == 3 * RANK and adapter.spans == ((0, 3 * INNER),)
    assert torch.allclose(adapter.dense(), 2.0 * shared[key].double() @ shared[key.replace("_B", "_A")].double(), rtol=1e-12)


@pytest.mark.parametrize(
    "tensors, metadata, fallback, scale, source",
    [
        (turbo_file.comfy_tensors(SHAPES, rank=128, alpha=8), {}, None, 0.0625, "alpha tensors"),
        (turbo_file.comfy_tensors(SHAPES, rank=128, alpha=128), {"alpha": "3"}, 8.0, 1.0, "alpha tensors"),
        (turbo_file.comfy_tensors(SHAPES, rank=128), {"alpha": "8"}, None, 0.0625, "metadata (alpha)"),
        (turbo_file.diffusers_tensors(SHAPES, rank=128), {"alpha": "8", "format": "pt"}, None, 0.0625, "metadata (alpha)"),
        (turbo_file.comfy_tensors(SHAPES, rank=128), {"training_alpha": "8"}, None, 0.0625, "metadata (training_alpha)"),
        (turbo_file.comfy_tensors(SHAPES, rank=128), {"training_scale": "0.0625"}, 1.0, 0.0625, "metadata (training_scale)"),
        (
            turbo_file.diffusers_tensors(SHAPES, rank=128),
            {"lora_adapter_metadata": json.dumps({"transformer.r": 128, "transformer.lora_alpha": 8})}, None, 0.0625,
            "metadata (transformer.lora_alpha)",
        ),
        (turbo_file.comfy_tensors(SHAPES, rank=128), {}, 8.0, 0.0625, "the table of known files"),
        (turbo_file.comfy_tensors(SHAPES, rank=128), {"alpha": "unknown"}, None, 1.0, "nowhere: alpha = rank was assumed"),
    ],
)  # fmt: skip
def test_alpha_from_tensors_metadata_table_or_nowhere(tensors, metadata, fallback, scale, source):
    # rank 384 with alpha 24 and rank 128 with alpha 8 are the same LoRA; 16 times too strong is the public bug (diffusers 14408)
    lora = turbo.read(tensors, metadata, fallback)
    assert lora.scales() == [scale] and lora.alpha_from.startswith(source)


def test_layers_outside_the_blocks_are_known():
    names = {
        "norm_out.linear": "final_layer.adaln_proj.linear", "proj_out": "final_layer.video_out", "audio_proj_out": "final_layer.audio_out",
        "proj_in": "video_patch_proj", "audio_proj_in": "audio_patch_proj", "context_embedder": "condition_proj",
        "time_embedder.linear_1": "time_embedder.proj_in", "time_embedder.linear_2": "time_embedder.proj_out",
        "transformer_blocks.3.adaln_proj.linear": "blocks.3.adaln_proj.linear"}  # fmt: skip
    for theirs, ours in names.items():
        pair = {f"transformer.{theirs}.lora_A.weight": torch.zeros(2, 8), f"transformer.{theirs}.lora_B.weight": torch.zeros(6, 2)}
        assert list(turbo.read(pair).adapters) == [ours]
        flat = {f"lora_unet_{ours.replace('.', '_')}.{k}.weight": v for k, v in zip(("lora_down", "lora_up"), pair.values(), strict=True)}
        assert list(turbo.read(flat).adapters) == [ours]


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({}, "its first key: none at all"),
        ({"lora_unet_down_blocks_0.lora_down.weight": torch.zeros(2, 2)}, "no key of a MiniMax H3 LoRA"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(2, 8)}, "only one half of its pair"),
        ({"blocks.0.mlp.fc1.lora_A.weight": torch.zeros(2, 8), "blocks.0.mlp.fc1.lora_B.weight": torch.zeros(4, 3)}, r"A \[2, 8\] and B"),
        ({k: v for k, v in SOURCE.items() if "to_k" not in k}, "has no pair for k"),
        ({"blocks.0.mlp.fc1.alpha": torch.zeros(2)}, "holds 2 values"),
        (SOURCE | COMFY, "comes twice"),
    ],
)
def test_damaged_files_are_refused_by_name(tensors, message):
    with pytest.raises(turbo.LoraError, match=message):
        turbo.read(tensors)


def test_match_counts_what_fits():
    lora = turbo.read(COMFY)
    shapes = dict(SHAPES)
    del shapes["blocks.1.mlp.fc2"]
    shapes["blocks.0.mlp.fc1"] = (10, 20)
    found = turbo.match(lora, shapes)
    assert len(found.adapters) == 10 and found.absent == ["blocks.1.mlp.fc2"]
    assert found.unfit == {"blocks.0.mlp.fc1": "LoRA [768, 256], model [10, 20]"}
    with pytest.raises(turbo.LoraError, match="none of the file's 12 modules fits"):
        turbo.match(lora, {"blocks.0.mlp.fc1": (10, 20)})


# -- AdaLN on pruned checkpoints ----------------------------------------------------------------------------------------------------

T_IN, T_HIDDEN, T_DIM, GRID, CURVE = 256, 96, 64, 1025, 8


def embedder(seed=0):
    g = torch.Generator("cpu").manual_seed(seed)
    return {
        "time_embedder.proj_in.weight": torch.randn(T_HIDDEN, T_IN, generator=g) * T_IN**-0.5,
        "time_embedder.proj_in.bias": torch.randn(T_HIDDEN, generator=g) * 0.02,
        "time_embedder.proj_out.weight": torch.randn(T_DIM, T_HIDDEN, generator=g) * T_HIDDEN**-0.5,
        "time_embedder.proj_out.bias": torch.randn(T_DIM, generator=g) * 0.02,
    }  # fmt: skip


def pruned_table(curve):
    """The table as pruning makes it: the curve in its leading right singular vectors."""
    _, _, basis = torch.linalg.svd(curve, full_matrices=False)
    return (curve @ basis[:CURVE].T).float()


def adaln_adapter(rank=4, seed=1):
    g = torch.Generator("cpu").manual_seed(seed)
    return turbo.Adapter(torch.randn(rank, T_DIM, generator=g), torch.randn(90, rank, generator=g), ((0, 90),), (1.0,))


def test_adaln_pairs_in_the_curve_basis_reproduce_the_full_delta():
    tensors = embedder()
    curve = adaln.time_curve(tensors.__getitem__, list(tensors), GRID)
    table, adapter = pruned_table(curve), adaln_adapter()
    assert adaln.check_table(curve, table) < 1e-4
    fit = adaln.fit(adapter, curve, table)
    fitted = turbo.in_curve_basis(adapter, fit)
    assert fitted.shape == (90, CURVE) and fit.bias.shape == (4,)
    full = curve @ adapter.dense().T
    got = (table.double() @ fitted.down.double().T + fitted.bias.double()) @ fitted.up.double().T
    assert float((got - full).norm() / full.norm()) == pytest.approx(fit.residual, rel=0.05)
    assert fit.residual < 1e-4


def test_a_table_without_the_mean_needs_the_constant():
    # an affine basis (the mean folded into the model's bias) spans the curve only with a constant beside it
    tensors = embedder()
    curve = adaln.time_curve(tensors.__getitem__, list(tensors), GRID)
    table = pruned_table(curve - curve.mean(dim=0))
    fit = adaln.fit(adaln_adapter(), curve, table)
    assert fit.residual < 1e-4 and float(fit.bias.abs().max()) > 0.1


def test_the_curve_is_core_s_time_embedder():
    tensors = embedder()
    points = adaln.time_curve(tensors.__getitem__, list(tensors), 5)
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    angle = t[:, None] * torch.exp(-torch.log(torch.tensor(10000.0, dtype=torch.float64)) * torch.arange(128) / 128)
    hidden = torch.cat([angle.cos(), angle.sin()], 1) @ tensors["time_embedder.proj_in.weight"].double().T
    hidden = torch.nn.functional.silu(hidden + tensors["time_embedder.proj_in.bias"].double())
    out = hidden @ tensors["time_embedder.proj_out.weight"].double().T + tensors["time_embedder.proj_out.bias"].double()
    assert torch.allclose(points, torch.nn.functional.silu(out), rtol=1e-12, atol=1e-14)
    diffusers_names = {
        "transformer." + k.replace("proj_in", "linear_1").replace("proj_out", "linear_2"): v for k, v in tensors.items()}  # fmt: skip
    assert torch.equal(points, adaln.time_curve(diffusers_names.__getitem__, list(diffusers_names), 5))


def test_another_model_s_curve_and_a_pruned_source_are_refused():
    mine, other = embedder(0), embedder(1)
    table = pruned_table(adaln.time_curve(mine.__getitem__, list(mine), GRID))
    wild = torch.randn(GRID, CURVE, generator=torch.Generator("cpu").manual_seed(2)).cumsum(0)
    with pytest.raises(ValueError, match="made from another checkpoint"):
        adaln.check_table(adaln.time_curve(other.__getitem__, list(other), GRID), wild)
    with pytest.raises(ValueError, match="no time_embedder.proj_in.weight"):
        adaln.time_curve({}.__getitem__, ["adaln_t_table"], GRID)
    assert adaln.check_table(adaln.time_curve(mine.__getitem__, list(mine), GRID), table) < adaln.MAX_TABLE_RESIDUAL


def test_match_finds_adaln_pairs_of_the_full_width():
    layer = "blocks.0.adaln_proj.linear"
    lora = turbo.read({f"{layer}.lora_A.weight": torch.zeros(2, T_DIM), f"{layer}.lora_B.weight": torch.zeros(90, 2)})
    found = turbo.match(lora, {layer: (90, CURVE)}, CURVE)
    assert list(found.full_adaln) == [layer] and not found.adapters
    with pytest.raises(turbo.LoraError):
        turbo.match(lora, {layer: (90, CURVE)})

"""LoRA files of any content: read to the exact delta, or refused by name; never another exception and never a number that is none."""

import json
import math

import torch
from h3_vortex.h3 import turbo
from h3_vortex.tests.fuzz import budget
from h3_vortex.tests.host import turbo_file
from hypothesis import given
from hypothesis import strategies as st

HIDDEN, HEADS, FFN = 16, 1, 24
INNER = HEADS * turbo.HEAD_DIM
LAYERS = {"attn.qkv_proj": (3 * INNER, HIDDEN), "attn.out_proj": (HIDDEN, INNER), "mlp.fc1": (2 * FFN, HIDDEN), "mlp.fc2": (HIDDEN, FFN)}
BLOCKS = ("blocks.0", "blocks.1", "blocks.49", "token_refiner.blocks.0")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODD_NUMBERS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300, 1e30)
KEYS = st.one_of(
    st.text(max_size=30),
    st.builds(
        "{}{}{}.{}{}".format,
        st.sampled_from(["", "diffusion_model.", "transformer.", "base_model.model.", "lora_unet_", "model.diffusion_model.", "lora_te_"]),
        st.sampled_from(
            ["blocks.0.", "transformer_blocks.0.", "blocks_0_", "token_refiner.blocks.1.", "final_layer.", "double_blocks.0.", ""]
        ),
        st.sampled_from(
            [
                "attn.qkv_proj",
                "attn.to_q",
                "attn.to_v",
                "attn_qkv_proj",
                "mlp.fc1",
                "ff.net.0.proj",
                "ff.net.2",
                "adaln_proj.linear",
                "video_out",
                "proj_out",
                "img_attn",
            ]
        ),
        st.sampled_from(["lora_A", "lora_B", "lora_down", "lora_up", "alpha", "lora.down", "lora_mid", "dora_scale", "diff"]),
        st.sampled_from(["", ".weight", ".default.weight", ".default", ".bias"]),
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["lora_alpha", "transformer.lora_alpha", "r", "x"]), inner),
    max_leaves=6,
)
METADATA = st.dictionaries(
    st.sampled_from(["alpha", "lora_alpha", "training_alpha", "training_scale", "ss_network_alpha", "format", "lora_adapter_metadata"]),
    st.one_of(st.text(max_size=6), st.sampled_from(["8", "0.0625", "nan", "inf", "-1", "[", "{}", "1e999"]), JSON.map(json.dumps)),
    max_size=3,
)


@st.composite
def tensors_of_any_kind(draw):
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
    )
    values = torch.full(shape, draw(st.sampled_from([0.0, 1.0, 8.0, math.nan, math.inf])), dtype=torch.float32)
    return values.nan_to_num(0, 1, 0).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def whole(lora):
    """What must hold of every file that was read."""
    assert lora.adapters and lora.describe()
    for layer, adapter in lora.adapters.items():
        assert turbo.LAYER.fullmatch(layer), layer
        out, _ = adapter.shape
        assert adapter.spans[0][0] == 0 and adapter.spans[-1][1] == out and adapter.width > 0
        assert all(a[1] == b[0] for a, b in zip(adapter.spans, adapter.spans[1:], strict=False))
        assert all(math.isfinite(scale) for scale in adapter.scales)
        assert adapter.rank == adapter.width * len(adapter.spans)
        assert adapter.dense().shape == adapter.shape


@budget(150)
@given(st.dictionaries(KEYS, tensors_of_any_kind(), max_size=6), METADATA)
def test_any_keys_shapes_and_metadata(tensors, metadata):
    try:
        lora = turbo.read(tensors, metadata)
    except turbo.LoraError as error:
        assert len(str(error)) > 20
        return
    whole(lora)


@st.composite
def files(draw):
    """(tensors of a well-formed file, metadata, {layer: exact delta})."""
    shapes = {
        f"{block}.{layer}": LAYERS[layer]
        for block in draw(st.sets(st.sampled_from(BLOCKS), min_size=1, max_size=3))
        for layer in draw(st.sets(st.sampled_from(sorted(LAYERS)), min_size=1))
    }
    rank, seed = draw(st.integers(1, 5)), draw(st.integers(0, 1000))
    alpha = draw(st.sampled_from([None, 1, 8, 0.5, 16]))
    dtype = draw(st.sampled_from(DTYPES))
    stated = draw(st.sampled_from([None, 2.0, 8.0])) if alpha is None else None
    scale = (alpha if alpha is not None else stated if stated is not None else rank) / rank
    options = {"rank": rank, "seed": seed, "dtype": dtype}
    source = turbo_file.diffusers_tensors(shapes, alpha=alpha, **options)
    form = draw(st.sampled_from(["diffusers", "ComfyUI", "native", "down/up"]))
    tensors = source if form == "diffusers" else turbo_file.comfy_tensors(shapes, alpha=alpha, **options)
    if form in ("native", "down/up"):
        tensors = {key.removeprefix("diffusion_model."): value for key, value in tensors.items()}
    if form == "down/up":
        tensors = {key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): value for key, value in tensors.items()}
    order = draw(st.permutations(sorted(tensors)))
    return {key: tensors[key] for key in order}, {} if stated is None else {"alpha": str(stated)}, exact(shapes, source, scale)


def exact(shapes, source, scale):
    """The float64 delta per layer, from the definition of diffusers' form."""

    def delta(name):
        down, up = (source[f"transformer.{name}.lora_{letter}.weight"].double() for letter in "AB")
        return scale * (up @ down)

    found = {}
    for layer in shapes:
        block, _, kind = layer.rpartition(".")
        block = block.removesuffix(".attn").removesuffix(".mlp")
        base = (
            block.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.") if block.startswith("token") else f"transformer_{block}"
        )
        if kind == "qkv_proj":
            found[layer] = torch.cat([delta(f"{base}.attn.to_{part}") for part in "qkv"])
        elif kind == "fc1":
            found[layer] = torch.cat(delta(f"{base}.ff.net.0.proj").chunk(2)[::-1])
        else:
            found[layer] = delta(base + {"out_proj": ".attn.to_out.0", "fc2": ".ff.net.2"}[kind])
    return found


@budget(40)
@given(files())
def test_well_formed_files_give_the_exact_delta(case):
    tensors, metadata, expected = case
    lora = turbo.read(tensors, metadata)
    whole(lora)
    assert set(lora.adapters) == set(expected) and not lora.unused
    for layer, adapter in lora.adapters.items():
        assert torch.allclose(adapter.dense(), expected[layer], rtol=1e-12, atol=1e-15), layer


@budget(60)
@given(files(), st.data())
def test_damaged_files_are_refused_or_lose_only_what_is_damaged(case, data):
    """One key is dropped, renamed, reshaped or given another number: a LoraError, or every untouched layer is still exact."""
    tensors, metadata, expected = case
    key = data.draw(st.sampled_from(sorted(tensors)))
    how = data.draw(st.sampled_from(["drop", "rename", "narrow", "transpose", "flatten", "integer", "number", "foreign"]))
    tensor = tensors.pop(key)
    if how == "rename":
        tensors[data.draw(KEYS)] = tensor
    elif how == "narrow" and tensor.dim():
        tensors[key] = tensor[: data.draw(st.integers(0, tensor.shape[0] - 1))]
    elif how == "transpose":
        tensors[key] = tensor.t() if tensor.dim() == 2 else tensor
    elif how == "flatten":
        tensors[key] = tensor.flatten()
    elif how == "integer":
        tensors[key] = tensor.to(torch.int8)
    elif how == "number" and tensor.dim() == 0:
        tensors[key] = torch.tensor(data.draw(st.sampled_from(ODD_NUMBERS)))
    elif how == "foreign":
        tensors[key], tensors["text_model.encoder.lora_A.weight"] = tensor, tensor
    try:
        lora = turbo.read(tensors, metadata)
    except turbo.LoraError as error:
        assert len(str(error)) > 20
        return
    whole(lora)
    touched = turbo._layer(turbo.KEY.fullmatch(key)["layer"])[0]
    for layer, delta in expected.items():
        if layer != touched and layer in lora.adapters and how != "rename":
            assert torch.allclose(lora.adapters[layer].dense(), delta, rtol=1e-12, atol=1e-15), layer


@budget(40)
@given(
    files(),
    st.dictionaries(st.sampled_from([f"{b}.{layer}" for b in BLOCKS for layer in LAYERS]), st.sampled_from([*LAYERS.values(), (8, 8)])),
    st.sampled_from([None, 8]),
)
def test_a_match_accounts_for_every_module(case, shapes, curve):
    tensors, metadata, _ = case
    lora = turbo.read(tensors, metadata)
    try:
        found = turbo.match(lora, shapes, curve)
    except turbo.LoraError as error:
        assert "fits this model" in str(error)
        return
    groups = [set(found.adapters), set(found.absent), set(found.unfit), set(found.full_adaln)]
    assert sum(map(len, groups)) == len(lora.adapters) and set().union(*groups) == set(lora.adapters)
    assert all(shapes[layer] == adapter.shape for layer, adapter in found.adapters.items())

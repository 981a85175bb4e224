"""The tiny checkpoints: same seed, same bytes; the structure ComfyUI detects them by; small files."""

import hashlib

import pytest
import torch
from h3_vortex.h3 import checkpoint, tiny
from safetensors.torch import load_file


def digests(paths):
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tiny.write_tiny_models(tmp_path_factory.mktemp("models"))


def test_names_and_folders(written):
    assert set(written) == {*tiny.FORMATS, "text_encoder", "video_vae", "audio_vae"}
    assert {path.parent.name for name, path in written.items() if name in tiny.FORMATS} == {"diffusion_models"}
    assert written["text_encoder"].parent.name == "text_encoders"
    assert written["video_vae"].parent.name == written["audio_vae"].parent.name == "vae"


def test_files_are_small(written):
    assert sum(path.stat().st_size for path in written.values()) < 100e6
    assert max(path.stat().st_size for name, path in written.items() if name in tiny.FORMATS) < 12e6


def test_same_seed_same_bytes_whatever_else_is_written(written, tmp_path):
    chosen = ("pruned_nvfp4", "int8_convrot", "fp8_scaled")
    again = tiny.write_tiny_models(tmp_path / "models", formats=chosen)
    assert set(again) == {*chosen, "text_encoder", "video_vae", "audio_vae"}
    first = digests(written)
    assert digests(again) == {name: first[name] for name in again}


def test_another_seed_other_bytes(written, tmp_path):
    other = tiny.write_tiny_models(tmp_path / "models", seed=1, formats=("bf16", "pruned_bf16"), text_encoder=False)
    first = digests(written)
    assert all(first[name] != digest for name, digest in digests(other).items())


def test_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="unknown tiny format 'gguf': choose from bf16, nvfp4"):
        tiny.write_tiny_models(tmp_path, formats=("gguf",))


@pytest.mark.parametrize("form", ["", "pruned_"])
def test_storages_hold_the_same_weights(written, form):
    """Every storage dequantises to the bf16 weights, within the step of its own format."""
    plain = load_file(written[form + "bf16"])
    layer = "blocks.1.mlp.fc2"
    weight = plain[layer + ".weight"].float()

    fp8 = load_file(written[form + "fp8_scaled"])
    value = fp8[layer + ".weight"].float() * fp8[layer + ".weight_scale"]
    # e4m3 has three mantissa bits: half a step is 2**-4 of the value, and 2**-10 of the scale below the normal range
    assert ((value - weight).abs() <= weight.abs() * 2**-4 + fp8[layer + ".weight_scale"] * 2**-10).all()

    fp4 = load_file(written[form + "nvfp4"])
    packed = fp4[layer + ".weight"]
    assert packed.dtype == torch.uint8 and packed.shape == (weight.shape[0], weight.shape[1] // 2)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    value = torch.stack([e2m1[(packed >> 4).long()], e2m1[(packed & 15).long()]], dim=-1).flatten(1)
    signs = torch.sign(value) * torch.sign(weight)
    assert (signs >= 0).all()

    int8 = load_file(written[form + "int8_convrot"])
    assert int8[layer + ".weight"].dtype == torch.int8
    assert int8[layer + ".weight_scale"].shape == (weight.shape[0], 1)
    for name in plain:
        if not (name.startswith("blocks.") and name.removesuffix(".weight").endswith(tiny.QUANTIZED_LAYERS)):
            for other in (fp8, fp4, int8):
                assert torch.equal(other[name].view(torch.uint8), plain[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", tiny.FORMATS)
def test_checkpoint_reader_knows_them(written, name):
    header = checkpoint.read_header(written[name])
    assert checkpoint.kind(header) == checkpoint.DIFFUSION_MODEL
    kinds = checkpoint.formats(header)
    stored = name.removeprefix("pruned_")
    for layer in tiny.QUANTIZED_LAYERS:
        assert kinds["blocks." + layer] == {stored: tiny.LAYERS}
    text = checkpoint.describe(header)
    assert ("pruned (adaLN curve [1025, 8])" in text) == name.startswith("pruned_")
    assert f"{tiny.LAYERS} blocks of width {tiny.HIDDEN}" in text


@pytest.mark.parametrize("name", ["text_encoder", "video_vae", "audio_vae"])
def test_thin_files_are_known_and_load_without_code(written, name):
    header = checkpoint.read_header(written[name])
    assert checkpoint.kind(header) == name
    state = torch.load(written[name], weights_only=True)
    big = max(state.values(), key=torch.Tensor.numel)
    assert big.untyped_storage().nbytes() < big.numel() * big.element_size() / 100  # a view of a short vector
    assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point() and value.numel() < 1e6)

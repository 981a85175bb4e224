"""Files that are cut short, in the wrong place, or something else are named before anything is loaded."""

import json

import pytest
import torch
from h3_vortex.h3 import checkpoint, tiny
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny.write_tiny_models(tmp_path_factory.mktemp("models"), formats=("nvfp4",), text_encoder=False)


def cut(path, target, keep):
    target.write_bytes(path.read_bytes()[:keep])
    return target


def test_truncated_safetensors_names_both_lengths(files, tmp_path):
    whole = files["nvfp4"].stat().st_size
    short = cut(files["nvfp4"], tmp_path / "minimax_x.safetensors", whole - 1000)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.read_header(short)
    assert str(caught.value) == (
        f"minimax_x.safetensors is truncated: header promises {whole} bytes, file has {whole - 1000}; download it again"
    )


@pytest.mark.parametrize("keep, said", [(5, "it has 5 bytes"), (200, "its header alone has")])
def test_cut_inside_the_header(files, tmp_path, keep, said):
    with pytest.raises(checkpoint.CheckpointError, match=said):
        checkpoint.read_header(cut(files["nvfp4"], tmp_path / "x.safetensors", keep))


def test_web_page_with_a_safetensors_name(tmp_path):
    page = tmp_path / "x.safetensors"
    page.write_text("<!doctype html><title>404</title>" * 20)
    with pytest.raises(checkpoint.CheckpointError, match="is not a safetensors file"):
        checkpoint.read_header(page)


def test_damaged_header(tmp_path):
    bad = tmp_path / "x.safetensors"
    bad.write_bytes((20).to_bytes(8, "little") + b"{" * 20)
    with pytest.raises(checkpoint.CheckpointError, match="damaged header"):
        checkpoint.read_header(bad)


@pytest.mark.parametrize("keep", [0, 100, 1_000_000])
def test_truncated_pytorch_file(files, tmp_path, keep):
    short = cut(files["audio_vae"], tmp_path / "vae.pt", keep)
    with pytest.raises(checkpoint.CheckpointError, match=r"vae\.pt cannot be read as a PyTorch file.*download it again"):
        checkpoint.read_header(short)


def test_code_in_a_pytorch_file_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Evil()}, tmp_path / "x.pt")
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read_header(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_wrong_slot_names_the_right_one(files):
    header = checkpoint.read_header(files["audio_vae"])
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.check_slot(header, "video_vae")
    assert str(caught.value) == "video_vae: 'minimax_h3_audio_vae_thin.pt' is an H3 audio VAE, put it in audio_vae"
    checkpoint.check_slot(header, "audio_vae")


def test_file_of_another_model(tmp_path):
    save_file({"decoder.conv_in.weight": torch.zeros(4, 4, 3, 3)}, tmp_path / "sd_vae.safetensors")
    header = checkpoint.read_header(tmp_path / "sd_vae.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match=r"is not an H3 video VAE \(its 1 tensors begin with decoder.conv_in"):
        checkpoint.check_slot(header, "video_vae")


def test_lora_in_the_model_slot(tmp_path):
    save_file({"diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight": torch.zeros(4, 4)}, tmp_path / "lora.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="is a LoRA, not an H3 diffusion model"):
        checkpoint.check_slot(checkpoint.read_header(tmp_path / "lora.safetensors"), "diffusion_model")


def test_quantisation_in_the_file_metadata(files, tmp_path):
    """Some files say how layers are stored in their metadata instead of in comfy_quant tensors."""
    weights = tiny.dit_state_dict("nvfp4")
    layers = {name.removesuffix(".comfy_quant"): {"format": "nvfp4"} for name in weights if name.endswith(".comfy_quant")}
    plain = {name: value for name, value in weights.items() if not name.endswith(".comfy_quant")}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save_file(plain, tmp_path / "meta.safetensors", metadata=metadata)
    with_tensors = checkpoint.formats(checkpoint.read_header(files["nvfp4"]))
    assert checkpoint.formats(checkpoint.read_header(tmp_path / "meta.safetensors")) == with_tensors


def test_diffusion_model_with_a_prefix(tmp_path):
    weights = {"model.diffusion_model." + name: value for name, value in tiny.dit_state_dict("pruned_bf16").items()}
    save_file(weights, tmp_path / "whole.safetensors")
    header = checkpoint.read_header(tmp_path / "whole.safetensors")
    assert checkpoint.kind(header) == "diffusion_model"
    assert "attn.qkv_proj: bf16 x2" in checkpoint.describe(header) and "pruned" in checkpoint.describe(header)

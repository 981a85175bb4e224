"""H3 Load: every tiny file loads and is described; wrong, truncated and missing files are named."""

import pytest


@pytest.fixture
def load(comfy, tiny_models):
    """Run the node in this process; ``prompt`` is the graph it stands in, as node "1"."""
    from h3_vortex.nodes.load import H3VortexLoad

    def run(prompt=None, **chosen):
        files = dict.fromkeys(("diffusion_model", "text_encoder", "video_vae", "audio_vae"), "none") | chosen
        node = H3VortexLoad.PREPARE_CLASS_CLONE(None)
        node.hidden = type("Hidden", (), {"prompt": prompt, "unique_id": "1"})
        return node.execute(weight_dtype="default", **files).result

    return run


@pytest.mark.parametrize("form", ["", "pruned_"])
@pytest.mark.parametrize("storage", ["bf16", "nvfp4", "int8_convrot", "fp8_scaled"])
def test_diffusion_models(comfy, tiny_models, load, form, storage):
    import comfy.model_base

    model, *_, info = load(diffusion_model=tiny_models[form + storage].name)
    assert isinstance(model.model, comfy.model_base.MiniMaxH3)
    assert f"attn.qkv_proj: {storage} x2" in info
    assert ("pruned (adaLN curve [1025, 8])" if form else "full (time embedder)") in info
    linear = model.model.diffusion_model.blocks[0].attn.qkv_proj
    want = {"bf16": None, "nvfp4": "nvfp4", "int8_convrot": "int8_tensorwise", "fp8_scaled": "float8_e4m3fn"}
    assert getattr(linear, "quant_format", None) == want[storage]


def test_vaes(tiny_models, load):
    _, _, vae, audio_vae, info = load(video_vae=tiny_models["video_vae"].name, audio_vae=tiny_models["audio_vae"].name)
    assert (vae.latent_channels, audio_vae.latent_channels) == (24, 32)
    assert "video_vae minimax_h3_video_vae_thin.pt" in info and "audio_vae minimax_h3_audio_vae_thin.pt" in info


def test_an_output_without_a_file_stops_its_user(load):
    from comfy_execution.graph_utils import ExecutionBlocker

    model, clip, vae, audio_vae, info = load()
    for output, slot in ((model, "diffusion_model"), (clip, "text_encoder"), (vae, "video_vae"), (audio_vae, "audio_vae")):
        assert isinstance(output, ExecutionBlocker) and f"'{slot}' is none but its output is used" in output.message
    assert info == "nothing was chosen"


def test_a_linked_output_without_a_file_is_refused_at_once(load):
    prompt = {"1": {"inputs": {"text_encoder": "none"}}, "2": {"inputs": {"clip": ["1", 1]}}}
    with pytest.raises(ValueError, match="H3 Load: 'text_encoder' is none but its output is used: choose a file there"):
        load(prompt)


def test_audio_vae_in_the_video_slot(tiny_models, load):
    with pytest.raises(ValueError, match="video_vae: 'minimax_h3_audio_vae_thin.pt' is an H3 audio VAE, put it in audio_vae"):
        load(video_vae=tiny_models["audio_vae"].name)


def test_truncated_file_and_other_model_over_http(server, tiny_models):
    """The error comes from H3 Load, says what to do, and the server goes on working."""
    import torch
    from safetensors.torch import save_file

    whole = tiny_models["pruned_bf16"].read_bytes()
    short = tiny_models["pruned_bf16"].with_name("minimax_cut.safetensors")
    other = tiny_models["video_vae"].with_name("other_vae.safetensors")
    short.write_bytes(whole[:-4096])
    save_file({"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}, other)
    try:

        def graph(**chosen):
            files = dict.fromkeys(("diffusion_model", "text_encoder", "video_vae", "audio_vae"), "none") | chosen
            return {
                "load": {"class_type": "H3VortexLoad", "inputs": {"weight_dtype": "default", **files}},
                "show": {"class_type": "PreviewAny", "inputs": {"source": ["load", 4]}},
            }

        result = server.queue(graph(diffusion_model=short.name))
        assert not result.ok and result.error["node_type"] == "H3VortexLoad"
        assert (
            f"minimax_cut.safetensors is truncated: header promises {len(whole)} bytes, file has {len(whole) - 4096}; download it again"
        ) in result.message()
        result = server.queue(graph(video_vae=other.name))
        assert "video_vae: 'other_vae.safetensors' is not an H3 video VAE" in result.message()
        result = server.queue(graph(diffusion_model=tiny_models["pruned_bf16"].name))
        assert result.ok, result.message()
        assert "pruned (adaLN curve [1025, 8])" in result.texts()[0]
    finally:
        short.unlink()
        other.unlink()


def test_reports_33_36_90_memory_beside_the_size(comfy, tiny_models, load, monkeypatch):
    import torch

    management = comfy.model_management
    path = tiny_models["pruned_bf16"]
    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", -1)
    *_, info = load(diffusion_model=path.name)
    size = f"{path.stat().st_size / 1e9:.3g} GB"
    memory, checked = info.splitlines()[-2:]
    ram = f"{management.get_total_memory(torch.device('cpu')) / 1e9:.1f}"
    assert memory.startswith(f"memory before loading: RAM {ram} GB (")
    assert memory.endswith(f" free), no GPU; the files: {size}, the diffusion model {size} of it")
    assert checked == "checked: header and length; no SHA-256, which would read every file a second time"

    room = {"cpu": (64e9, 50.5e9), "cuda": (16e9, 15e9)}
    monkeypatch.setattr(management, "MAX_PINNED_MEMORY", 25.6e9)
    monkeypatch.setattr(management, "get_torch_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(management, "get_total_memory", lambda device: room[device.type][0])
    monkeypatch.setattr(management, "get_free_memory", lambda device: room[device.type][1])
    from h3_vortex.nodes import load as node

    assert node._memory() == "RAM 64.0 GB (50.5 free), of which ComfyUI pins at most 25.6 GB, VRAM 16.0 GB (15.0 free)"
    monkeypatch.delattr(management, "MAX_PINNED_MEMORY")  # a core without it
    assert node._memory() == "RAM 64.0 GB (50.5 free), VRAM 16.0 GB (15.0 free)"


@pytest.mark.parametrize("cuda, storage, warns", [
    ("12.8", "nvfp4", True), ("12.8", "int8_convrot", True), ("12.8", "bf16", False), ("13.0", "nvfp4", False), (None, "nvfp4", False)])
def test_report_83_a_torch_too_old_for_the_file_is_named(tiny_models, load, monkeypatch, cuda, storage, warns):
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    *_, info = load(diffusion_model=tiny_models[storage].name)
    lines = [line for line in info.splitlines() if line.startswith("warning: ")]
    assert len(lines) == warns
    if warns:
        assert f"has {storage} layers" in lines[0] and "is built for CUDA 12.8: below 13.0 ComfyUI leaves" in lines[0]
        assert lines[0].endswith("install a torch for CUDA 13.0 or newer")

"""H3 Decode: core's frames and sound, a second try when memory runs out, and a latent that is never lost."""

import logging

import pytest
import torch


@pytest.fixture
def node(comfy, monkeypatch, tmp_path):
    from h3_vortex.nodes.decode import H3VortexDecode

    monkeypatch.setattr(comfy.folder_paths, "output_directory", str(tmp_path))
    return H3VortexDecode


@pytest.fixture(scope="module")
def vaes(comfy, tiny_models):
    loader = comfy.nodes.VAELoader()
    return tuple(loader.load_vae(tiny_models[name].name)[0] for name in ("video_vae", "audio_vae"))


def latent(seed=0):
    from comfy.nested_tensor import NestedTensor

    gen = torch.Generator().manual_seed(seed)
    video, audio = torch.randn(1, 24, 2, 4, 4, generator=gen), torch.randn(1, 32, 2, 8, generator=gen)
    return {"samples": NestedTensor((video, audio))}


def kept(tmp_path):
    return sorted((tmp_path / "h3_vortex_latents").glob("*"))


class Vae:
    """Enough of a ``comfy.sd.VAE`` for core's decode nodes; ``failures`` are raised first, one per call."""

    def __init__(self, audio=False, failures=()):
        self.latent_channels, self.latent_dim = (32, 2) if audio else (24, 3)
        self.audio_sample_rate, self.audio = 32000, audio
        self.failures, self.calls = list(failures), []
        self.first_stage_model = self

    def temporal_compression_decode(self):
        return 4

    def spacial_compression_decode(self):
        return 16

    def _decode(self, how, z):
        self.calls.append(how)
        if self.failures:
            raise self.failures.pop(0)
        if self.audio:
            return torch.linspace(-0.5, 0.5, 6400)[None, :, None].expand(1, 6400, 2).clone()
        return torch.full((1, 5, 64, 64, 3), 0.5)

    def decode(self, z):
        return self._decode("plain", z)

    def decode_tiled(self, z, **tiles):
        return self._decode("tiled", z)


@pytest.mark.slow
def test_same_as_cores_decode_nodes(node, vaes, comfy, tmp_path):
    from comfy_extras.nodes_audio import VAEDecodeAudio

    given = latent()
    images, sound, movie, info = node.execute(*vaes, given).result
    assert torch.equal(images, comfy.nodes.VAEDecode().decode(vaes[0], given)[0])
    want = VAEDecodeAudio.execute(vaes[1], given).result[0]
    assert torch.equal(sound["waveform"], want["waveform"]) and sound["sample_rate"] == want["sample_rate"] == 32000
    parts = movie.get_components()
    assert parts.frame_rate == 24 and torch.equal(parts.images, images)
    assert torch.equal(parts.audio["waveform"], sound["waveform"])
    assert info.startswith("64 x 64, 5 frames = 0.208 s, sound 0.200 s at 32000 Hz (peak ")
    assert kept(tmp_path) == []


@pytest.mark.parametrize("free", [True, False])
def test_models_are_unloaded_first(node, comfy, monkeypatch, free):
    order = []
    monkeypatch.setattr(comfy.model_management, "unload_all_models", lambda: order.append("unload"))
    vae = Vae()
    monkeypatch.setattr(vae, "decode", lambda z: (order.append("decode"), torch.full((1, 5, 64, 64, 3), 0.5))[1])
    node.execute(vae, Vae(audio=True), latent(), free_models=free)
    assert order == (["unload", "decode"] if free else ["decode"])


def test_out_of_memory_is_tried_again_in_tiles(node, comfy, monkeypatch, tmp_path, caplog):
    unloaded = []
    monkeypatch.setattr(comfy.model_management, "unload_all_models", lambda: unloaded.append(1))
    oom = comfy.model_management.OOM_EXCEPTION
    vae, audio_vae = Vae(failures=[oom("no memory")]), Vae(audio=True, failures=[oom("no memory")])
    with caplog.at_level(logging.WARNING, logger="h3_vortex"):
        images, sound, _, info = node.execute(vae, audio_vae, latent()).result
    assert vae.calls == ["plain", "tiled"] and audio_vae.calls == ["plain", "plain"] and len(unloaded) == 3
    assert images.shape == (5, 64, 64, 3) and "video and sound after running out of memory once" in info
    assert "decoding again" in caplog.text and kept(tmp_path) == []


def test_a_failed_decode_keeps_the_latent_and_says_how_to_resume(node, comfy, tmp_path):
    oom = comfy.model_management.OOM_EXCEPTION
    given = latent(seed=4)
    with pytest.raises(RuntimeError, match="OutOfMemoryError: really none. The latent is safe in .*saved_latent") as caught:
        node.execute(Vae(failures=[oom("none"), oom("really none")]), Vae(audio=True), given)
    (path,) = kept(tmp_path)
    assert str(path) in str(caught.value)
    assert path.name in node.define_schema().inputs[3].options

    class Watching(Vae):
        def decode(self, z):
            self.seen = z
            return super().decode(z)

    vae, audio_vae = Watching(), Watching(audio=True)
    images, *_ = node.execute(vae, audio_vae, saved_latent=path.name).result
    assert images.shape == (5, 64, 64, 3)
    video, audio = given["samples"].unbind()
    assert torch.equal(vae.seen, video) and torch.equal(audio_vae.seen, audio)
    assert kept(tmp_path) == [path]  # a file that the user chose is not removed


def test_other_errors_are_not_tried_again(node, tmp_path):
    vae = Vae(failures=[KeyError("broken")])
    with pytest.raises(RuntimeError, match="H3 Decode: KeyError: 'broken'. The latent is safe in"):
        node.execute(vae, Vae(audio=True), latent())
    assert vae.calls == ["plain"] and len(kept(tmp_path)) == 1


def test_an_interrupt_keeps_the_latent_and_stays_an_interrupt(node, comfy, tmp_path, caplog):
    stop = comfy.model_management.InterruptProcessingException
    with caplog.at_level(logging.WARNING, logger="h3_vortex"), pytest.raises(stop):
        node.execute(Vae(failures=[stop()]), Vae(audio=True), latent())
    (path,) = kept(tmp_path)
    assert f"interrupted; The latent is safe in {path}" in caplog.text


def test_a_full_disk_does_not_stop_the_decode(node, tmp_path, caplog):
    (tmp_path / "h3_vortex_latents").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="h3_vortex"):
        images, *_ = node.execute(Vae(), Vae(audio=True), latent()).result
    assert images.shape[0] == 5 and "could not be saved before decoding" in caplog.text


def test_broken_sound_is_reported(node, monkeypatch):
    vae = Vae(audio=True)
    monkeypatch.setattr(vae, "decode", lambda z: torch.zeros(1, 3200, 2))
    *_, info = node.execute(Vae(), vae, latent()).result
    assert "check: the sound is silent; video and sound differ by 0.108 s" in info


@pytest.mark.parametrize(
    "given, message",
    [
        ((Vae(audio=True), Vae(audio=True)), "'vae' takes the H3 video VAE, but it got an H3 audio VAE"),
        ((Vae(), Vae()), "'audio_vae' takes the H3 audio VAE, but it got an H3 video VAE"),
        ((None, Vae(audio=True)), "nothing is connected to 'vae'"),
    ],
)
def test_wrong_vaes(node, given, message):
    with pytest.raises(ValueError, match=message):
        node.execute(*given, latent())


def test_vae_of_another_model(node, comfy):
    """core's own pixel-space VAE: any VAE but H3's."""
    other = comfy.nodes.VAELoader().load_vae("pixel_space")[0]
    with pytest.raises(ValueError, match="'vae' takes the H3 video VAE, but it got .*a VAE of another model"):
        node.execute(other, Vae(audio=True), latent())


@pytest.mark.parametrize("nested", [False, True])
def test_report_40_video_alone_is_a_silent_video(node, tmp_path, nested):
    from comfy.nested_tensor import NestedTensor
    from comfy_execution.graph_utils import ExecutionBlocker

    video, _ = latent()["samples"].unbind()
    audio_vae = Vae(audio=True)
    images, sound, movie, info = node.execute(Vae(), audio_vae, {"samples": NestedTensor((video,)) if nested else video}).result
    parts = movie.get_components()
    assert torch.equal(parts.images, images) and images.shape == (5, 64, 64, 3) and parts.audio is None
    assert isinstance(sound, ExecutionBlocker) and "holds video alone, so there is nothing on 'audio'" in sound.message
    assert info.startswith("64 x 64, 5 frames = 0.208 s, no sound in the latent; decoded in ")
    assert audio_vae.calls == [] and kept(tmp_path) == []


@pytest.mark.parametrize("nested", [False, True])
def test_report_40_sound_alone_is_sound(node, tmp_path, nested):
    from comfy.nested_tensor import NestedTensor
    from comfy_execution.graph_utils import ExecutionBlocker

    _, audio = latent()["samples"].unbind()
    vae = Vae()
    images, sound, movie, info = node.execute(vae, Vae(audio=True), {"samples": NestedTensor((audio,)) if nested else audio}).result
    assert sound["waveform"].shape == (1, 2, 6400) and sound["sample_rate"] == 32000
    for output, name in ((images, "images"), (movie, "video")):
        assert isinstance(output, ExecutionBlocker) and f"holds sound alone, so there is nothing on '{name}'" in output.message
    assert info.startswith("sound 0.200 s at 32000 Hz (") and "no video in the latent" in info
    assert vae.calls == [] and kept(tmp_path) == []


@pytest.mark.parametrize("part", ["video", "audio"])
def test_report_40_one_stream_is_kept_and_resumed(node, tmp_path, part):
    video, audio = latent(seed=3)["samples"].unbind()
    given = video if part == "video" else audio
    fails = {"failures": [KeyError("broken")]}
    with pytest.raises(RuntimeError, match="The latent is safe in"):
        node.execute(Vae(**fails), Vae(audio=True, **fails), {"samples": given})
    (path,) = kept(tmp_path)
    vae, audio_vae = Vae(), Vae(audio=True)
    *_, info = node.execute(vae, audio_vae, saved_latent=path.name).result
    assert (vae.calls, audio_vae.calls) == ((["plain"], []) if part == "video" else ([], ["plain"]))
    assert f"no {'sound' if part == 'video' else 'video'} in the latent" in info


def test_wrong_latents(node, tmp_path):
    with pytest.raises(ValueError, match="is not a MiniMax H3 latent: it has 1 stream"):
        node.execute(Vae(), Vae(audio=True), {"samples": torch.zeros(1, 16, 2, 8, 8)})
    with pytest.raises(ValueError, match="nothing is connected to 'latent'"):
        node.execute(Vae(), Vae(audio=True))
    assert kept(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", ["video", "sound"])
def test_report_40_one_stream_in_a_workflow(server, tiny_models, part):
    """What core's own encoders make of frames, or of sound: H3 Decode shows it, and only what is missing stops its user."""
    files = {"diffusion_model": "none", "text_encoder": "none", **{slot: tiny_models[slot].name for slot in ("video_vae", "audio_vae")}}
    graph = {
        "load": {"class_type": "H3VortexLoad", "inputs": {"weight_dtype": "default", **files}},
        "decode": {"class_type": "H3VortexDecode", "inputs": {"vae": ["load", 2], "audio_vae": ["load", 3], "latent": ["latent", 0]}},
        "info": {"class_type": "PreviewAny", "inputs": {"source": ["decode", 3]}},
    }
    if part == "video":
        graph["given"] = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 5, "color": 255}}
        graph["latent"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["given", 0], "vae": ["load", 2]}}
    else:
        graph["given"] = {"class_type": "EmptyAudio", "inputs": {"duration": 0.2, "sample_rate": 32000, "channels": 2}}
        graph["latent"] = {"class_type": "VAEEncodeAudio", "inputs": {"audio": ["given", 0], "vae": ["load", 3]}}
    missing = "sound" if part == "video" else "video"
    present, absent = (0, 1) if part == "video" else (1, 0)
    graph["present"] = {"class_type": "PreviewAny", "inputs": {"source": ["decode", present]}}
    result = server.queue(graph)
    assert result.ok and any(f"no {missing} in the latent" in text for text in result.texts()), result.message()
    graph["absent"] = {"class_type": "PreviewAny", "inputs": {"source": ["decode", absent]}}
    result = server.queue(graph)
    assert f"H3 Decode: the latent holds {part} alone, so there is nothing on " in result.message()

"""H3 Conditioning: what core's nodes would give, sizes refused by rule, and rows counted as the model packs them."""

import json

import pytest
import torch
from h3_vortex.h3 import grid
from h3_vortex.tests.conftest import ROOT


@pytest.fixture
def node(comfy):
    from h3_vortex.nodes.conditioning import H3VortexConditioning

    return H3VortexConditioning


@pytest.fixture(scope="module")
def tokenizer(comfy):
    from comfy.text_encoders.minimax import MiniMaxH3Tokenizer

    return MiniMaxH3Tokenizer()


@pytest.fixture
def clip(tokenizer):
    """The real tokenizer with a stand-in for the 25 GB network: a vector per token, of its place in the prompt."""

    class Clip:
        def __init__(self):
            self.tokenizer = tokenizer

        def tokenize(self, text, **kwargs):
            return self.tokenizer.tokenize_with_weights(text, **kwargs)

        def encode_from_tokens_scheduled(self, tokens):
            length = len(tokens["qwen3vl_32b"][0])
            states = torch.arange(length, dtype=torch.float32)[None, :, None].expand(1, length, 8).clone()
            return [[states, {"minimax_token_tags": torch.ones(length, dtype=torch.long)}]]

    return Clip()


class Vae:
    """The shapes of the H3 VAEs."""

    def __init__(self, audio=False):
        self.latent_channels, self.latent_dim = (32, 2) if audio else (24, 3)
        self.audio_sample_rate = 32000
        self.first_stage_model = self

    def encode(self, x):
        if self.latent_dim == 2:  # [1, samples, 2]
            return torch.zeros(1, 32, 2, x.shape[1] // 800)
        frames, height, width = x.shape[:3]
        return torch.zeros(1, 24, grid.latent_frames(frames) if frames > 1 else 1, height // 16, width // 16)


SIZE = {"width": 64, "height": 96, "frames": 22, "seconds": 0.0}
IMAGE = torch.zeros(1, 64, 64, 3)
SOUND = {"waveform": torch.zeros(1, 2, 8000), "sample_rate": 32000}


def packed_rows(positive, latent):
    """Rows per kind, as the model itself packs the sequence."""
    from comfy.ldm.minimax.model import PackedLayout

    video, audio = latent["samples"].unbind()
    extra = positive[0][1]
    layout = PackedLayout(
        positive[0][0].shape[1],
        *video.shape[2:],
        audio.shape[-1],
        keyframes=extra.get("minimax_keyframes"),
        refs=extra.get("minimax_refs"),
    )
    rows = {}
    for begin, end, kind in layout.segments:
        rows[kind] = rows.get(kind, 0) + end - begin
    return rows, layout.seq_len


CASES = {
    "t2va": {},
    "fl2va": {"first_frame": IMAGE, "last_frame": IMAGE},
    "fl2va guide": {"guide_image": IMAGE.expand(6, -1, -1, -1), "guide_audio": SOUND, "guide_frame": 17},
    "ref2va": {
        "ref_images": {"ref_image_0": IMAGE, "ref_image_1": None},
        "ref_videos": {"ref_video_0": IMAGE.expand(23, -1, -1, -1)},
        "ref_video_audios": {"ref_video_audio_0": SOUND},
        "ref_audios": {"ref_audio_0": SOUND},
    },
    "ref2va guide": {"ref_images": {"ref_image_0": IMAGE}, "guide_image": IMAGE, "guide_frame": -1},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_cores_layout(node, clip, case):
    positive, latent, info = node.execute(clip, "A test", **SIZE, vae=Vae(), audio_vae=Vae(audio=True), **CASES[case]).result
    rows, total = packed_rows(positive, latent)
    kinds = [kind for kind in ("text", "cond", "cond_audio", "ref_img", "ref_audio", "audio", "video") if kind in rows]
    listed = ", ".join(f"{kind} {rows[kind]}" for kind in kinds)
    assert info == f"{case.split()[0]}, 64 x 96, 22 frames = 0.917 s; packed rows: {total} ({listed})"
    video, audio = latent["samples"].unbind()
    assert tuple(video.shape) == grid.video_latent_shape(64, 96, 22)
    assert tuple(audio.shape) == grid.audio_latent_shape(22)


def test_same_as_cores_nodes(node, clip):
    from comfy_extras.nodes_minimax_h3 import MiniMaxH3ImageToVideo

    images = {"first_frame": torch.rand(1, 48, 80, 3), "last_frame": torch.rand(1, 80, 48, 3)}
    want, want_latent = MiniMaxH3ImageToVideo.execute(clip, Vae(), "A test", 64, 96, 22, **images).result
    got, latent, _ = node.execute(clip, "A test", **SIZE, vae=Vae(), **images).result
    assert torch.equal(got[0][0], want[0][0])
    assert [k["resolved_frame_index"] for k in got[0][1]["minimax_keyframes"]] == [0, 21]
    assert len(want[0][1]["minimax_keyframes"]) == 2
    for mine, cores in zip(latent["samples"].unbind(), want_latent["samples"].unbind(), strict=True):
        assert torch.equal(mine, cores)


def test_grid_is_cores(comfy):
    from comfy_extras import nodes_minimax_h3 as core

    for frames in range(5, 3593, 17):
        assert core.temporal_shape(frames) == (frames, grid.latent_frames(frames), grid.audio_latent_frames(frames))
        assert core.align_frame_count(frames) == frames
    assert (core.CANVAS_MULTIPLE, core.FPS, core.AUDIO_LATENT_FPS) == (
        grid.SIZE_STEP,
        grid.FRAME_RATE,
        grid.AUDIO_LATENT_RATE,
    )


def test_seconds_take_the_nearest_legal_length(node, clip):
    _, latent, info = node.execute(clip, "A test", **SIZE | {"frames": 5, "seconds": 1.0}).result
    assert "22 frames = 0.917 s" in info and latent["samples"].unbind()[0].shape[2] == 7


@pytest.mark.parametrize(
    "change, message",
    [
        ({"width": 1350}, "width 1350 is not a multiple of 32: use 1344 or 1376"),
        ({"height": 100}, "height 100 is not a multiple of 32: use 96 or 128"),
        ({"frames": 100}, "100 frames is not on the 17k+5 grid: use 90 or 107"),
        ({"seconds": 500.0}, "500 seconds is out of range"),
    ],
)
def test_wrong_sizes(node, clip, change, message):
    assert message in node.validate_inputs(**SIZE | change)
    with pytest.raises(ValueError, match="use"):  # a number that came through a link meets the same rule
        node.execute(clip, "A test", **SIZE | change)
    assert node.validate_inputs(**SIZE | dict.fromkeys(change)) is True  # linked: None until the run


@pytest.mark.parametrize("change", [{"width": 1350}, {"frames": 100}])
def test_wrong_sizes_are_refused_before_anything_runs(server, change):
    graph = json.loads((ROOT / "workflows" / "api" / "demo_t2va.json").read_text(encoding="utf-8"))
    graph["conditioning"]["inputs"].update(change)
    result = server.queue(graph)
    assert not result.ok and result.prompt_id is None and result.events == []
    message = {"width": "use 1344 or 1376", "frames": "use 90 or 107"}[next(iter(change))]
    assert message in result.message() and "H3VortexConditioning" in result.message()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"first_frame": IMAGE}, "nothing is connected to 'vae': connect the video VAE of H3 Load"),
        ({"first_frame": IMAGE, "vae": Vae(audio=True)}, "'vae' takes the H3 video VAE, but it got an H3 audio VAE"),
        ({"guide_audio": SOUND}, "nothing is connected to 'audio_vae'"),
        ({"guide_audio": SOUND, "audio_vae": Vae()}, "'audio_vae' takes the H3 audio VAE, but it got an H3 video VAE"),
        (
            {"first_frame": IMAGE, "ref_images": {"ref_image_0": IMAGE}, "vae": Vae()},
            "first_frame and last_frame do not go with references",
        ),
        (
            {"ref_video_audios": {"ref_video_audio_1": SOUND}, "audio_vae": Vae(audio=True)},
            "ref_video_audio_1 has no reference video of the same number",
        ),
    ],
)
def test_wrong_connections(node, clip, given, message):
    with pytest.raises(ValueError, match=message):
        node.execute(clip, "A test", **SIZE, **given)


def test_another_text_encoder(node, clip):
    clip.tokenizer = object()
    with pytest.raises(ValueError, match="the text encoder on 'clip' has a object, H3 needs its Qwen3-VL"):
        node.execute(clip, "A test", **SIZE)
    with pytest.raises(ValueError, match="nothing is connected to 'clip'"):
        node.execute(None, "A test", **SIZE)

"""Random jobs (text, frames, references of any number and size) and random node inputs, against core's own packing and checks."""

import math

import pytest
import torch
from h3_vortex.h3 import grid, presets, sigmas
from h3_vortex.kernels import segments
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.fuzz import budget
from h3_vortex.tests.host.sampling import fused, same, sample
from hypothesis import given
from hypothesis import strategies as st

SIDES = st.integers(1, 4).map(lambda n: 2 * n)


@st.composite
def conditions(draw):
    """(text tokens, video shape, audio shape, keyframes, references) of one job, as core's nodes attach them."""
    task = draw(st.sampled_from(["t2va", "fl2va", "ref2va", "both"]))
    height, width, frames = draw(SIDES), draw(SIDES), draw(st.sampled_from([5, 22]))
    video, audio = (1, 24, grid.latent_frames(frames), height, width), (1, 32, 2, grid.audio_latent_frames(frames))

    def latent(*shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    keyframes, references = [], []
    if task in ("fl2va", "both"):
        for _ in range(draw(st.integers(1, 3))):
            keyframe = {"resolved_frame_index": draw(st.integers(0, frames - 1))}
            which = draw(st.sampled_from(["image", "sound", "image and sound"]))
            if "image" in which:
                keyframe["latent"] = latent(1, 24, draw(st.integers(1, 2)), height, width)
            if "sound" in which:
                keyframe["audio_latent"] = latent(1, 32, 2, draw(st.integers(1, 5)))
            keyframes.append(keyframe)
    if task in ("ref2va", "both"):
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["image", "audio", "video", "video_audio"]))
            entry = {"kind": kind}
            if kind != "audio":
                h, w = draw(SIDES), draw(SIDES)
                count = 1 if kind == "image" else draw(st.integers(1, 3))
                entry |= {"latent_h": h, "latent_w": w, "latent": latent(1, 24, count, h, w)}
                if kind != "image":
                    entry |= {"latent_t": count, "ref_audio_t": 0}
            if kind in ("audio", "video_audio"):
                rate = draw(st.integers(1, 6))
                entry |= {"ref_audio_t": rate, "audio_latent": latent(1, 32, 2, rate)}
            references.append(entry)
    return draw(st.integers(1, 12)), video, audio, keyframes, references


@budget(50)
@given(conditions())
def test_layout_is_cores(comfy, job):
    from comfy.ldm.minimax.model import PackedLayout

    text, video, audio, keyframes, references = job
    layout = PackedLayout(text, *video[2:], audio[-1], keyframes=keyframes or None, refs=references or None)
    counted = {}
    for start, stop, kind in layout.segments:
        counted[kind] = counted.get(kind, 0) + stop - start
    assert grid.segment_rows(text, video, audio, keyframes, references) == {kind: rows for kind, rows in counted.items() if rows}
    kinds = sorted(counted)
    rows = segments.row_map([(start, stop, kinds.index(kind)) for start, stop, kind in layout.segments], layout.seq_len, "cpu")
    assert torch.bincount(rows, minlength=len(kinds)).tolist() == [counted[kind] for kind in kinds]
    assert layout.segments[-1][0] == layout.seq_len - counted["video"], "the report's count of rows ahead of the video"


@pytest.fixture(scope="module")
def model(comfy, tiny_models):
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_bf16"]))
    yield patcher
    comfy.model_management.unload_all_models()


@budget(6)
@given(conditions())
def test_patched_is_stock_for_any_job(model, job):
    from h3_vortex.kernels.patch import comfyui

    text, video, _, keyframes, references = job
    extra = {"minimax_token_tags": torch.ones(text, dtype=torch.long)}
    extra |= {"minimax_keyframes": keyframes} if keyframes else {}
    extra |= {"minimax_refs": references} if references else {}
    positive = [[torch.randn(1, text, 5120, generator=torch.Generator().manual_seed(text)), extra]]
    size = (video[4] * 16, video[3] * 16, grid.frames_for_latent(video[2]))
    patched = comfyui.accelerate(model, Features(allow_eager=True))
    assert same(sample(patched, positive, steps=1, size=size), sample(model, positive, steps=1, size=size))
    told = comfyui.report(patched)
    assert told["stepped_aside"] is None and fused(told, "gate_norm_modulate") == len(model.model.diffusion_model.blocks)


# -- node inputs ---------------------------------------------------------------------------------------------------------------------

ODD = st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324])
SIZES = st.integers(-64, 17000) | st.integers(0, 512).map(lambda n: 32 * n)
FRAMES = st.integers(-20, 5000) | st.integers(-1, 220).map(lambda k: 17 * k + 5)
SECONDS = ODD | st.floats(-5, 200) | st.just(0.0)


@budget(300)
@given(SIZES, SIZES, FRAMES, SECONDS)
def test_conditioning_takes_exactly_what_h3_can_make(comfy, width, height, frames, seconds):
    from h3_vortex.nodes.conditioning import H3VortexConditioning

    answer = H3VortexConditioning.validate_inputs(width=width, height=height, frames=frames, seconds=seconds)
    good_size = all(32 <= side <= grid.MAX_SIZE and side % 32 == 0 for side in (width, height))
    good_length = 0 < seconds <= grid.MAX_FRAMES / 24 if seconds else 5 <= frames <= grid.MAX_FRAMES and frames % 17 == 5
    if not (good_size and good_length):
        assert isinstance(answer, str) and any(word in answer for word in ("use", "out of range"))
        return
    assert answer is True
    length = grid.frames_for_seconds(seconds) if seconds else frames
    assert length % 17 == 5 and grid.frames_for_latent(grid.latent_frames(length)) == length
    if seconds:
        assert abs(length - seconds * 24) <= 8.5 + 1e-6 or length == 5
    if width * height * length < 64 * 64 * 200:
        from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

        streams = EmptyMiniMaxH3LatentAV.execute(width, height, length).result[0]["samples"].unbind()
        assert [tuple(s.shape) for s in streams] == [grid.video_latent_shape(width, height, length), grid.audio_latent_shape(length)]


@budget(150)
@given(st.integers(-3, 300), ODD | st.floats(-2, 120))
def test_sigmas_run_from_one_to_zero_or_are_refused(steps, shift):
    try:
        values = sigmas.turbo(steps, shift).tolist()
    except ValueError as error:
        assert "steps is" in str(error) or "shift" in str(error)
        return
    # the official arithmetic, in fp32, leaves the first value within eps / shift of 1; shifts that lose more are refused
    assert len(values) == steps + 1 and abs(values[0] - 1) <= 1e-5 and values[-1] == 0.0
    assert all(math.isfinite(v) and a >= v for a, v in zip(values, values[1:], strict=False))


@budget(150)
@given(
    st.text(max_size=40)
    | st.builds(
        "".join,
        st.lists(
            st.sampled_from(
                ["H3", "turbo", "_", "-", "4", "8", "16", "99", "step", "steps", "768p", "fl2v", "ref2va", ".safetensors", "/", "\\", " "]
            ),
            max_size=9,
        ),
    )
)
def test_any_file_name_gets_settings_that_sample(name):
    preset, how = presets.choose(name, lambda: "0" * 64)
    values = preset.sigmas()
    assert how and len(values) == preset.steps + 1 and 1 <= preset.steps <= 16 and values[0] == 1 and values[-1] == 0


@budget(100)
@given(
    st.text(max_size=30)
    | st.builds("".join, st.lists(st.sampled_from(["..", "/", "\\", "\0", "a.safetensors", "h3_vortex_latents", "~", "C:"]), max_size=6))
)
def test_no_choice_of_a_saved_latent_leaves_its_folder(comfy, tmp_path_factory, name):
    from h3_vortex.nodes import decode

    with pytest.raises(ValueError, match="'saved_latent' .* is not a file of output/h3_vortex_latents"):
        decode._chosen(name)

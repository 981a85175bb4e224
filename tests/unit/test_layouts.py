"""The packed sequence, its grids and its schedule: diffusers' against ``h3/``. ComfyUI's are in the host tier (test_layouts_comfyui.py)."""

import pytest
import torch
from h3_vortex.h3 import grid, sigmas
from h3_vortex.tests.unit import h3_jobs

pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as rules

VIDEO, SOUND = (1, 24, *h3_jobs.TARGET[:3]), (1, 32, 2, h3_jobs.TARGET[3])


def conditions(kind):
    """(keyframes, references) of a kind as ComfyUI's conditioning carries them."""
    if kind in h3_jobs.KEYFRAMES:
        return [{"latent": torch.empty(1, 24, 1, *h3_jobs.TARGET[1:3])} for _ in h3_jobs.KEYFRAMES[kind]], []
    references = []
    for name, shape, rows in h3_jobs.REFERENCES[kind]:
        entry = {"kind": name, "ref_audio_t": rows}
        if shape:
            entry |= {"latent_t": shape[0], "latent_h": shape[1], "latent_w": shape[2]}
        references.append(entry)
    return [], references


@pytest.mark.parametrize("kind", h3_jobs.KINDS)
def test_rows_of_each_kind(kind):
    positions, tags, video, sound, text, video_conditions, sound_conditions = h3_jobs.layout(kind)
    rows = grid.segment_rows(len(h3_jobs.text_tags(kind)), VIDEO, SOUND, *conditions(kind))
    assert sum(rows.values()) == len(positions) == len(tags)
    assert rows["text"] == len(text)
    assert rows.get("cond", 0) + rows.get("ref_img", 0) == video_conditions and rows["video"] == len(video) - video_conditions
    assert rows.get("ref_audio", 0) == sound_conditions and rows["audio"] == len(sound) - sound_conditions
    everything = torch.cat([text, video, sound]).sort().values
    assert torch.equal(everything, torch.arange(len(tags))), "every row belongs to one stream"
    assert set(tags[video].tolist()) == {0} and set(tags[sound].tolist()) == {2}
    assert torch.equal(video[video_conditions:], torch.arange(len(tags) - rows["video"], len(tags))), "the target video is last"


@pytest.mark.parametrize("seconds", [0.2, 1, 5, 5.1, 7.77, 15])
def test_frame_grid(seconds):
    frames = grid.frames_for_seconds(seconds)
    assert rules.align_num_frames(frames, grid.FRAME_STEP, 5) == frames
    assert rules.video_latent_num_frames(frames, grid.FRAME_STEP, 5) == grid.latent_frames(frames)
    assert rules.audio_latent_num_frames(frames) == grid.audio_latent_frames(frames)


def test_constants():
    assert (rules.MINIMAX_H3_FPS, rules.MINIMAX_H3_AUDIO_LATENTS_PER_SECOND, rules.MINIMAX_H3_AUDIO_CHANNELS) == (
        grid.FRAME_RATE, grid.AUDIO_LATENT_RATE, grid.AUDIO_TRACKS)


@pytest.mark.parametrize("steps", [1, 4, 8, 24, 50])
@pytest.mark.parametrize("shift", [12.0, 6.0, 3.0])
def test_schedule(steps, shift):
    """Bit for bit: diffusers counts the points of the schedule, h3/ counts the model calls."""
    scheduler = MiniMaxH3Scheduler(shift=shift)
    scheduler.set_timesteps(steps + 1)
    assert torch.equal(scheduler.sigmas, sigmas.turbo(steps, shift)) and len(scheduler.timesteps) == steps

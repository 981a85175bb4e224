"""Sigma grids of both streams against the published values and diffusers' own scheduler."""

import pytest
import torch
from h3_vortex.h3 import presets, sigmas

# published grids (model cards and the official formula), video 12 and 6, sound 3
VIDEO = {
    (4, 12.0): [1, 0.9730, 0.9231, 0.8, 0],
    (4, 6.0): [1, 0.9474, 0.8571, 0.6667, 0],
    (8, 12.0): [1, 0.9882, 0.9730, 0.9524, 0.9231, 0.8780, 0.8, 0.6316, 0],
    (8, 6.0): [1, 0.9767, 0.9474, 0.9091, 0.8571, 0.7826, 0.6667, 0.4615, 0],
}
AUDIO = {4: [1, 0.9, 0.75, 0.5, 0], 8: [1, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3, 0]}


@pytest.mark.parametrize("steps, shift", VIDEO)
def test_published_grids(steps, shift):
    video = sigmas.turbo(steps, shift)
    assert video.dtype == torch.float32 and len(video) == steps + 1
    assert [round(v, 4) for v in video.tolist()] == VIDEO[steps, shift]
    audio = sigmas.change_shift(video, shift, 3.0)
    assert [round(v, 4) for v in audio.tolist()] == AUDIO[steps]


@pytest.mark.parametrize("shift", [12.0, 6.0, 3.0])
@pytest.mark.parametrize("steps", [1, 4, 6, 8, 20, 50])
def test_bytes_of_the_official_grid(steps, shift):
    scheduling = pytest.importorskip("diffusers.schedulers.scheduling_minimax_h3")
    official = scheduling.MiniMaxH3Scheduler(shift)
    official.set_timesteps(steps + 1)  # it counts grid points, the last 0 included
    assert torch.equal(official.sigmas, sigmas.turbo(steps, shift))


def test_the_carry_is_the_ratio_of_the_clocks_and_has_its_limit():
    video = sigmas.turbo(8, 12.0).double()
    audio = sigmas.change_shift(video, 12.0, 3.0)
    carry = sigmas.carry(video, audio, 12.0, 3.0)
    assert carry[0] == 1 and carry[-1] == 4
    # closed form: sigma_v / sigma_a = scale / (1 + (scale - 1) sigma_a)
    assert torch.allclose(carry, 4 / (1 + 3 * audio), rtol=1e-12)


def test_changing_the_shift_and_back():
    video = sigmas.turbo(50, 12.0)
    back = sigmas.change_shift(sigmas.change_shift(video, 12.0, 3.0), 3.0, 12.0)
    assert torch.allclose(back, video.double(), rtol=0, atol=1e-15)
    assert sigmas.change_shift(0.8, 12.0, 3.0) == pytest.approx(0.5)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="steps is 0"):
        sigmas.turbo(0, 12.0)
    with pytest.raises(ValueError, match="shift is 0"):
        sigmas.turbo(4, 0.0)


# -- presets --------------------------------------------------------------------------------------------------------------------------

FILES = {
    "minimax_h3_fl2v_turbo_4step_v0.1.safetensors": (4, 12, 3, 8),
    "minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors": (8, 12, 3, 8),
    "h3/minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors": (8, 12, 3, 8),
    "minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors": (4, 6, 3, 128),
    "minimax_h3_fl2v_turbo_4step_v1.1_768p_comfyui_bf16.safetensors": (4, 6, 3, 128),
    "minimax_h3_fl2v_turbo_8step_v1.0_768p_bf16.safetensors": (8, 6, 3, None),
    "minimax_h3_ref2v_turbo_4step_v0.1.safetensors": (4, 12, 3, None),
    "Minimax-H3-ref2v-turbo-8step-v1.0-768p.safetensors": (8, 6, 3, None),
    "minimax_h3_turbo_v4_step600_ema.safetensors": (4, 12, 3, None),
    "minimax_h3_turbo_4step_ema_ckpt850.safetensors": (4, 12, 3, None),
}


@pytest.mark.parametrize("name", FILES)
def test_known_files(name):
    preset, how = presets.choose(name)
    assert (preset.steps, preset.shift_video, preset.shift_audio, preset.alpha) == FILES[name]
    assert how.startswith("known file name") and preset.sampler == "turbo_euler"
    assert torch.equal(preset.sigmas(), sigmas.turbo(preset.steps, preset.shift_video))


def test_a_renamed_file_is_known_by_its_content():
    hash_of_v4 = "5f3a626cd72c93a8b9318d6760c510bc5092d2ab13aaba1f932c5bab07a416d3"
    preset, how = presets.choose("my lora.safetensors", lambda: hash_of_v4)
    assert preset.steps == 4 and how == "known content (larryvrh Turbo v4)"


def test_unknown_files_say_so():
    preset, how = presets.choose("mine_6steps_768p.safetensors", lambda: "0" * 64)
    assert (preset.steps, preset.shift_video) == (6, 6.0) and "unknown file: 6 steps from its name" in how
    preset, how = presets.choose("mine.safetensors", lambda: "0" * 64)
    assert (preset.steps, preset.shift_video) == (8, 12.0) and "because its name states none" in how


def test_a_known_name_is_not_hashed():
    presets.choose("minimax_h3_turbo_v4_step600.safetensors", lambda: pytest.fail("hashed a file that its name tells"))


def test_hyperflow_has_its_own_grid():
    preset, _ = presets.choose("minimax_h3_hyperflow.safetensors")
    assert preset.sigmas().tolist() == pytest.approx([1, 0.99391, 0.98429, 0.96606, 0.92308, 0.83494, 0.69685, 0.46875, 0])
    assert torch.equal(preset.sigmas(steps=4), sigmas.turbo(4, 12.0))


def test_base_schedules_are_flagged():
    preset = presets.CHOICES["4 steps, 12/3"]
    assert presets.schedule_warning(preset, 8) is None
    assert "20 steps with a Turbo LoRA made for 4" in presets.schedule_warning(preset, 20)

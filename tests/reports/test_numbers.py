"""Reports that are about numbers: the very sizes, lengths and scales that went wrong."""

import pytest
import torch
from h3_vortex.h3 import grid, presets, samplers, turbo


@pytest.mark.parametrize("width, height, nearest", [
    (1056, 592, "height 592 is not a multiple of 32: use 576 or 608"),  # report 47
    (1072, 608, "width 1072 is not a multiple of 32: use 1056 or 1088"),
    (304, 192, "width 304 is not a multiple of 32: use 288 or 320"),  # report 45: 19 latent columns
])  # fmt: skip
def test_reports_45_47_sizes_between_the_grid_are_refused_with_their_neighbours(width, height, nearest):
    with pytest.raises(grid.GridError, match=nearest):
        grid.video_latent_shape(width, height, 5)
    for side in map(int, nearest.split("use ")[1].split(" or ")):
        grid.check_size("side", side)


@pytest.mark.parametrize("latent_frames, nearest", [(1, "2 or 7"), (3, "2 or 7"), (6, "2 or 7"), (36, "32 or 37")])
def test_report_48_lengths_off_the_grid_name_their_neighbours(latent_frames, nearest):
    with pytest.raises(grid.GridError, match=f"{latent_frames} latent frames is not on the 5k\\+2 grid: use {nearest}"):
        grid.frames_for_latent(latent_frames)


@pytest.mark.parametrize("where", ["alpha", "training_alpha", "lora_adapter_metadata", "known file"])
def test_report_55_alpha_8_of_rank_128_is_one_sixteenth_wherever_it_is_stated(where):
    pair = {"transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight": torch.ones(128, 8),
            "transformer.transformer_blocks.0.attn.to_out.0.lora_B.weight": torch.ones(8, 128)}  # fmt: skip
    metadata = {"lora_adapter_metadata": '{"transformer.lora_alpha": 8}'} if where == "lora_adapter_metadata" else {where: "8"}
    known = presets.choose("minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors")[0]
    lora = turbo.read(pair, {} if where == "known file" else metadata, known.alpha if where == "known file" else None)
    assert lora.scales() == [0.0625] and lora.describe() == "1 modules, rank 128, scale 0.0625"


def test_report_67_settings_come_from_the_files_name():
    preset, how = presets.choose("minimax_h3_fl2v_turbo_4step_v1.1_768p_comfyui.safetensors")
    assert (preset.steps, preset.shift_video, preset.shift_audio) == (4, 6.0, 3.0) and how.startswith("known file name")


def test_report_68_four_steps_come_with_a_word_on_the_sound_and_six_can_be_chosen():
    for name in ("minimax_h3_fl2v_turbo_4step_v0.1.safetensors", "minimax_h3_ref2v_turbo_4step_v0.1_comfyui_bf16.safetensors"):
        assert "6 to 8 steps clear it" in presets.choose(name)[0].note
    assert presets.CHOICES["6 steps, 12/3"].steps == 6


def test_report_70_noise_is_off_unless_asked_for():
    import inspect

    for sample in (samplers.turbo_euler, *samplers.ONE_CLOCK.values()):
        assert inspect.signature(sample).parameters["eta"].default == 0.0

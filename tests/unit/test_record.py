"""The run record, the saved latent and the loudness check."""

import hashlib
import json
import math
import re

import pytest
import torch
from h3_vortex.h3 import VERSION, latent_file, levels, record
from h3_vortex.tests.conftest import ROOT


def test_version_is_the_projects():
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version == VERSION


def test_sha256_is_that_of_the_raw_bytes():
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    want = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert record.sha256(tensor) == want
    assert record.sha256(tensor.t().contiguous().t()) == want  # values, not strides
    assert record.sha256(tensor.bfloat16()) == hashlib.sha256(tensor.bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()
    tensor[1, 2] = -0.0
    assert record.sha256(tensor) != want


def test_finite_streams_pass_and_others_are_named():
    good = {"video": torch.ones(2, 3), "sound": torch.ones(4)}
    record.check_finite(good, 1)
    good["sound"][1] = math.nan
    good["sound"][2] = math.inf
    with pytest.raises(record.NotFinite, match="after step 1 the sound latent has 2 of 4 values"):
        record.check_finite(good, 1)


def test_clock_counts_steps_and_waits_for_the_device():
    waits = []
    clock = record.StepClock("cpu", lambda: waits.append(1))
    clock.start()
    for _ in range(3):
        clock.tick()
    made = clock.record(torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8), seed=5, versions={"comfyui": "x"})
    assert len(waits) == 5
    assert made["steps"] == len(made["step_ms"]) == 3 and all(ms >= 0 for ms in made["step_ms"])
    assert made["seed"] == 5 and made["peak_memory_bytes"] is None and made["device"] == "cpu"
    assert made["versions"] == {"h3_vortex": VERSION, "torch": torch.__version__, "comfyui": "x"}
    assert json.loads(json.dumps(made)) == made


def test_saved_latent_comes_back_to_the_bit(tmp_path):
    video, audio = torch.randn(1, 24, 2, 4, 4), torch.randn(1, 32, 2, 8).transpose(0, 1).contiguous().transpose(0, 1)
    latent_file.save(tmp_path / "sub" / "a.safetensors", video, audio)
    got_video, got_audio = latent_file.load(tmp_path / "sub" / "a.safetensors")
    assert torch.equal(got_video.view(torch.int32), video.view(torch.int32))
    assert torch.equal(got_audio.view(torch.int32), audio.view(torch.int32))


def test_other_files_are_not_latents(tmp_path):
    from safetensors.torch import save_file

    save_file({"video": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="x.safetensors is not a latent that H3 Decode saved"):
        latent_file.load(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="y.safetensors cannot be read"):
        latent_file.load(tmp_path / "y.safetensors")


def test_levels():
    t = torch.arange(32000) / 32000
    level = levels.measure((0.5 * torch.sin(2 * math.pi * 440 * t)).expand(1, 2, -1))
    assert level.peak == pytest.approx(20 * math.log10(0.5), abs=0.01)
    assert level.rms == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=0.01)
    assert level.faults() == []
    assert levels.measure(torch.zeros(1, 2, 100)).faults() == ["the sound is silent"]
    assert "10.0% of the samples clip" in levels.measure(torch.tensor([[[1.0] + [-0.1] * 9]])).faults()[0]
    assert "constant offset of +0.300" in levels.measure(torch.full((1, 2, 100), 0.3)).faults()[0]

"""The embedded engine: the whole pipeline of diffusers on a tiny model, with the kernels and without, to a file and a record."""

import json
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.frontdoor import cmd_demo, cmd_generate, embedded_demo
from h3_vortex.h3 import embedded, presets, sigmas
from h3_vortex.h3.embedded import Clip, Request, RequestError
from h3_vortex.kernels.patch.ops import Features

pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")
pytest.importorskip("transformers")
EAGER = Features(allow_eager=True)
SHORT = {"prompt": "a fox in the snow", "width": 64, "height": 32, "seconds": 1.0, "steps": 2}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_VORTEX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def engine():
    return embedded.open_engine(device="cpu")


@pytest.fixture(scope="module")
def reference_engine():
    return embedded.open_engine(references=True, device="cpu")


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A picture, a clip with sound and a sound file."""
    import av
    from PIL import Image

    folder = tmp_path_factory.mktemp("media")
    Image.effect_noise((70, 50), 80).convert("RGB").save(folder / "picture.png")
    noise = torch.randint(0, 256, (30, 32, 64, 3), dtype=torch.uint8)
    embedded.write_mp4(folder / "clip.mp4", Clip(noise, torch.rand(2, 40000) - 0.5, 32000, {}))
    with av.open(str(folder / "sound.wav"), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=32000, layout="mono")
        frame = av.AudioFrame.from_ndarray((torch.rand(1, 16000) * 1000).to(torch.int16).numpy(), format="s16", layout="mono")
        frame.sample_rate = 32000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return SimpleNamespace(picture=folder / "picture.png", clip=folder / "clip.mp4", sound=folder / "sound.wav")


def both(engine, request):
    ours, stock = engine.generate(request, features=EAGER), engine.generate(request, accelerated=False)
    assert embedded.equal(ours, stock)
    assert stock.record["kernels"] is None
    assert all(calls["fused"] and not calls["stock"] for calls in ours.record["kernels"]["ops"].values())
    return ours


@pytest.mark.parametrize("keyframes", [(), ("first_frame",), ("last_frame",), ("first_frame", "last_frame")], ids=" ".join)
def test_text_and_keyframes(engine, media, keyframes):
    clip = both(engine, Request(**SHORT, **dict.fromkeys(keyframes, media.picture)))
    assert clip.frames.shape == (22, 32, 64, 3) and clip.frames.dtype == torch.uint8
    assert clip.rate == 32000 and clip.sound.shape == (2, 37 * 800)
    record = json.loads(json.dumps(clip.record))
    assert record["steps"] == len(record["step_ms"]) == 2 and record["request"]["frames"] == 22
    assert record["video_shape"] == [1, 24, 7, 2, 4] and record["kernels"]["model_calls"] == 2


@pytest.mark.parametrize("kinds", [("picture",), ("picture", "sound"), ("clip", "picture")], ids=" ".join)
def test_references(reference_engine, media, kinds):
    both(reference_engine, Request(**SHORT, references=tuple(getattr(media, kind) for kind in kinds)))


def test_the_seed_decides(engine):
    one, other = (engine.generate(Request(**SHORT, seed=seed), accelerated=False) for seed in (0, 1))
    assert not embedded.equal(one, other)


def test_equal_sees_every_part(engine):
    clip = engine.generate(Request(**SHORT), accelerated=False)
    assert embedded.equal(clip, clip)
    frames, sound = clip.frames.clone(), clip.sound.clone()
    frames[0, 0, 0, 0] += 1
    sound[0, 0] = -sound[0, 0]
    assert not embedded.equal(clip, Clip(frames, clip.sound, clip.rate, clip.record))
    assert not embedded.equal(clip, Clip(clip.frames, sound, clip.rate, clip.record))
    assert not embedded.equal(clip, Clip(clip.frames, clip.sound, clip.rate, {**clip.record, "audio_sha256": ""}))


def test_mp4(tmp_path):
    noise = torch.randint(0, 256, (24, 64, 96, 3), dtype=torch.uint8)
    embedded.write_mp4(tmp_path / "new folder" / "clip.mp4", Clip(noise, torch.rand(2, 32000) * 4 - 2, 32000, {}))
    found = cmd_demo.describe_video(tmp_path / "new folder" / "clip.mp4")
    assert {key: found[key] for key in cmd_demo.EXPECTED} == cmd_demo.EXPECTED
    assert (found["width"], found["height"], found["frames"], found["fps"]) == (96, 64, 24, 24.0) and found["samples"] >= 32000


def test_a_model_directory(engine, tmp_path):
    """Saved by diffusers, loaded by name; 5 s, for a loaded model keeps the released one's limits."""
    engine.pipeline.save_pretrained(str(tmp_path / "model"))
    loaded = embedded.open_engine(tmp_path / "model", device="cpu")
    blocks = [e.transformer().transformer_blocks.state_dict() for e in (engine, loaded)]
    assert all(torch.equal(value, blocks[1][name]) for name, value in blocks[0].items())
    assert loaded.transformer().proj_in.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="between 5.0 and 15.0 seconds"):
        loaded.generate(Request(**SHORT))


@pytest.mark.parametrize("changes, message", [
    ({"width": 60}, "width 60 is not a multiple of 32"),
    ({"seconds": 0}, "0 seconds is out of range"),
    ({"seconds": 0.3}, "0.3 seconds are too short"),
    ({"steps": 0}, "steps is 0"),
    ({"first_frame": "nowhere.png"}, "nowhere.png is not there"),
    ({"references": ("a.png",), "last_frame": "b.png"}, "two transformers"),
], ids=str)  # fmt: skip
def test_requests_that_cannot_be_made(changes, message):
    with pytest.raises(ValueError, match=message):
        Request(**{**SHORT, **changes}).check()


def test_files_that_are_no_use(engine, reference_engine, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "notes.txt").write_text("no medium")
    with pytest.raises(RequestError, match="no picture that Pillow can read"):
        engine.generate(Request(**SHORT, first_frame=tmp_path / "text.png"))
    with pytest.raises(RequestError, match=r"\.txt is no known kind"):
        reference_engine.generate(Request(**SHORT, references=(tmp_path / "notes.txt",)))
    with pytest.raises(RequestError, match="open it the other way"):
        engine.generate(Request(**SHORT, references=(tmp_path / "text.png",)))
    with pytest.raises(RequestError, match="holds no modular_model_index.json"):
        embedded.open_engine(tmp_path, device="cpu")
    with pytest.raises(RequestError, match="turbo file .* is not there"):
        embedded.open_engine(turbo=tmp_path / "none.safetensors", device="cpu")


# -- Turbo -----------------------------------------------------------------------------------------------------------------------


def lora_file(path, transformer, metadata=None):
    """A LoRA of rank 4 on the attention of every block, in ComfyUI's names."""
    from safetensors.torch import save_file

    inner, hidden = transformer.transformer_blocks[0].attn.to_q.weight.shape
    tensors = {}
    for index in range(len(transformer.transformer_blocks)):
        for layer, out, into in (("qkv_proj", 3 * inner, hidden), ("out_proj", hidden, inner)):
            name = f"diffusion_model.blocks.{index}.attn.{layer}"
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = torch.randn(4, into) * 0.1, torch.randn(out, 4) * 0.1
    save_file(tensors, path, metadata)
    return tensors


@pytest.mark.parametrize("name, alpha", [("h3_turbo_4step.safetensors", None), ("fl2v_turbo_4step_v0.1.safetensors", 8.0)])
def test_turbo(tmp_path, engine, name, alpha):
    pytest.importorskip("peft")
    tensors = lora_file(tmp_path / name, engine.transformer())
    turbo = embedded.open_engine(turbo=tmp_path / name, device="cpu")
    preset, _ = presets.choose(name)
    assert turbo.turbo[0] == preset and preset.alpha == alpha
    clip = both(turbo, Request(**{**SHORT, "steps": None}))
    assert clip.record["steps"] == preset.steps and preset.describe() == clip.record["turbo"]["preset"]
    layer = turbo.transformer().transformer_blocks[0].attn.to_out[0]
    key = "diffusion_model.blocks.0.attn.out_proj.lora_{}.weight"
    delta = layer.scaling["turbo"] * (layer.lora_B["turbo"].weight.float() @ layer.lora_A["turbo"].weight.float())
    expected = tensors[key.format("B")] @ tensors[key.format("A")] * ((alpha or 4) / 4)
    assert torch.allclose(delta, expected, rtol=2**-6, atol=2**-6)  # factors and products rounded to bf16
    assert not embedded.equal(clip, engine.generate(Request(**{**SHORT, "steps": preset.steps}), accelerated=False))


def test_turbo_schedule_is_set_and_put_back(engine):
    schedulers = engine.pipeline.scheduler, engine.pipeline.audio_scheduler
    for preset in (presets.Preset("shifted", 3, 6.0, 3.0), presets.Preset("own grid", 8, grid=presets.HYPERFLOW)):
        engine.turbo = (preset, "test")
        try:
            with engine._schedule(preset.steps):
                for scheduler in schedulers:
                    scheduler.set_timesteps(preset.steps + 1, device="cpu")
            video, audio = (scheduler.sigmas for scheduler in schedulers)
            assert torch.equal(video, preset.sigmas()) and len(audio) == len(video) and audio[-1] == 0
            carried = sigmas.change_shift(video[:-1], preset.shift_video, preset.shift_audio).float()
            assert torch.allclose(audio[:-1], carried, rtol=1e-6)
        finally:
            engine.turbo = None
        assert [scheduler.shift for scheduler in schedulers] == [12.0, 3.0] and "set_timesteps" not in vars(schedulers[0])


# -- the front door, in this process ----------------------------------------------------------------------------------------------


def test_demo_compares_and_writes(tmp_path, capsys, monkeypatch, engine):
    monkeypatch.setattr(embedded, "open_engine", lambda **_: engine)
    assert embedded_demo.run(tmp_path, cpu=True) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "patched == stock: equal" and "h264 96x64" in said
    assert json.loads((tmp_path / "h3_vortex_demo.json").read_text())["kernels"]["ops"]


def test_demo_fails_when_bytes_differ(tmp_path, capsys, monkeypatch, engine):
    monkeypatch.setattr(embedded, "open_engine", lambda **_: engine)
    monkeypatch.setattr(embedded, "equal", lambda *_: False)
    assert embedded_demo.run(tmp_path, cpu=True) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_generate_writes_clip_and_record(tmp_path, capsys, monkeypatch, engine):
    import argparse

    monkeypatch.setattr(embedded, "open_engine", lambda *_, **__: engine)
    parser = argparse.ArgumentParser()
    cmd_generate.add_arguments(parser)
    line = ["--prompt", "a fox", "--seconds", "1", "--steps", "1", "--out", str(tmp_path / "fox.mp4"), "--device", "cpu"]
    assert cmd_generate.generate(parser.parse_args(line)) == 0
    assert (tmp_path / "fox.mp4").stat().st_size > 1000 and json.loads((tmp_path / "fox.json").read_text())["ranks"] == 1
    assert cmd_generate.generate(parser.parse_args([*line, "--width", "50"])) == 2
    assert "width 50 is not a multiple of 32: use 32 or 64" in capsys.readouterr().err

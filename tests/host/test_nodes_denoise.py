"""H3 Packed Denoiser: core's bytes, a true record, a stop on broken numbers, and clear refusals."""

import json
import logging
import math
import threading
import time

import pytest
import torch


@pytest.fixture
def node(comfy):
    from h3_vortex.nodes.denoise import H3VortexDenoise

    return H3VortexDenoise


@pytest.fixture
def load(comfy, tiny_models):
    return lambda name: comfy.nodes.UNETLoader().load_unet(tiny_models[name].name, "default")[0]


def conditioning(tokens=8, fill=None):
    states = torch.randn(1, tokens, 5120, generator=torch.Generator().manual_seed(3))
    if fill is not None:
        states[0, 0] = fill
    tags = torch.ones(tokens, dtype=torch.long)
    tags[2:5] = 0
    return [[states, {"minimax_token_tags": tags}]]


def empty_latent(width=64, height=96, frames=22):
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    return EmptyMiniMaxH3LatentAV.execute(width, height, frames).result[0]


def schedule(model, sampler="euler", steps=3):
    from comfy_extras.nodes_custom_sampler import BasicScheduler, KSamplerSelect

    return {
        "sampler": KSamplerSelect.execute(sampler).result[0],
        "sigmas": BasicScheduler.execute(model, "simple", steps, 1.0).result[0],
    }


def equal_bytes(got, want):
    pairs = zip(got["samples"].unbind(), want["samples"].unbind(), strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


@pytest.mark.parametrize("name", ["pruned_nvfp4", "bf16", "int8_convrot"])
@pytest.mark.parametrize("sampler", ["euler", "res_multistep", "er_sde"])
def test_same_bytes_as_sampler_custom_advanced(node, load, name, sampler):
    from comfy_extras.nodes_custom_sampler import BasicGuider, RandomNoise, SamplerCustomAdvanced

    model, positive = load(name), conditioning()
    given = schedule(model, sampler)
    # on some GPUs the first attention call of a process takes another backend than every later one
    node.execute(model, positive, empty_latent(), **given, seed=1)
    noise, guider = RandomNoise.execute(11).result[0], BasicGuider.execute(model, positive).result[0]
    want = SamplerCustomAdvanced.execute(noise, guider, given["sampler"], given["sigmas"], empty_latent()).result[0]
    got, text = node.execute(model, positive, empty_latent(), **given, seed=11).result
    assert equal_bytes(got, want)
    assert all(stream.abs().sum() > 0 for stream in got["samples"].unbind())
    with_noise, other_text = node.execute(model, positive, empty_latent(), **given, seed=5, noise=noise).result
    assert equal_bytes(with_noise, want)
    first, second = json.loads(text), json.loads(other_text)
    assert first["seed"] == second["seed"] == 11
    assert (first["video_sha256"], first["audio_sha256"]) == (second["video_sha256"], second["audio_sha256"])
    another, _ = node.execute(model, positive, empty_latent(), **given, seed=12).result
    assert not equal_bytes(another, want)


def test_the_record(node, load):
    from h3_vortex.h3.record import sha256

    model = load("pruned_nvfp4")
    latent, text = node.execute(model, conditioning(), empty_latent(), **schedule(model, steps=4), seed=0).result
    made = json.loads(text)
    video, audio = latent["samples"].unbind()
    assert made["steps"] == len(made["step_ms"]) == 4
    assert (made["video_sha256"], made["audio_sha256"]) == (sha256(video), sha256(audio))
    assert (made["video_shape"], made["audio_shape"]) == ([1, 24, 7, 6, 4], [1, 32, 2, 37])
    assert made["sigmas"][0] == 1.0 and made["sigmas"][-1] == 0.0 and len(made["sigmas"]) == 5
    assert made["device"].split(":")[0] in ("cpu", "cuda") and made["versions"]["comfyui"] != "unknown"
    assert sum(made["step_ms"]) + made["setup_ms"] <= made["total_ms"]


def test_the_model_given_is_left_alone(node, load):
    model = load("bf16")
    before = {kind: {key: list(found) for key, found in keyed.items()} for kind, keyed in model.wrappers.items()}
    given = schedule(model)
    node.execute(model, conditioning(), empty_latent(), **given, seed=0)
    node.execute(model, conditioning(), empty_latent(), **given, seed=0)
    assert {kind: {key: list(found) for key, found in keyed.items()} for kind, keyed in model.wrappers.items()} == before


def test_progress_is_reported_per_step(node, load, comfy, monkeypatch):
    seen = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *rest, **more: seen.append((value, total)))
    model = load("bf16")
    node.execute(model, conditioning(), empty_latent(), **schedule(model, steps=3), seed=0)
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_numbers_stop_after_the_first_step(node, load, value, monkeypatch):
    from h3_vortex.h3 import record

    ticks = []
    monkeypatch.setattr(record.StepClock, "tick", lambda self: (ticks.append(1), self.step_ms.append(0.0)))
    model = load("bf16")
    with pytest.raises(ValueError, match="after step 1 the video latent has .* values that are NaN or infinite"):
        node.execute(model, conditioning(fill=value), empty_latent(), **schedule(model, steps=5), seed=0)
    assert len(ticks) == 1
    latent, _ = node.execute(model, conditioning(), empty_latent(), **schedule(model), seed=0).result
    assert all(torch.isfinite(stream).all() for stream in latent["samples"].unbind())


def nested(*shapes):
    from comfy.nested_tensor import NestedTensor

    return {"samples": NestedTensor([torch.zeros(shape) for shape in shapes])}


@pytest.mark.parametrize(
    "latent, message",
    [
        (lambda: nested((2, 24, 2, 4, 4), (2, 32, 2, 8)), "is a batch of 2; H3 makes one clip at a time"),
        (lambda: {"samples": torch.zeros(1, 4, 8, 8)}, "is not a MiniMax H3 latent: it has 1 stream"),
        (lambda: nested((1, 128, 2, 4, 4), (1, 8, 8, 16)), r"its video stream is \[1, 128, 2, 4, 4\]"),
        (lambda: None, "nothing is connected to 'latent'"),
    ],
)
def test_wrong_latents(node, load, latent, message):
    model = load("bf16")
    with pytest.raises(ValueError, match=message):
        node.execute(model, conditioning(), latent(), **schedule(model), seed=0)


def test_wrong_model_and_empty_schedule(node, load):
    class Other:
        model = object()

    model = load("bf16")
    with pytest.raises(ValueError, match="the model on 'model' is object, not MiniMax H3"):
        node.execute(Other(), conditioning(), empty_latent(), **schedule(model), seed=0)
    with pytest.raises(ValueError, match="nothing is connected to 'model'"):
        node.execute(None, conditioning(), empty_latent(), **schedule(model), seed=0)
    with pytest.raises(ValueError, match=r"'sigmas' has 0 value\(s\)"):
        node.execute(model, conditioning(), empty_latent(), **schedule(model) | {"sigmas": torch.tensor([])}, seed=0)


def test_a_length_off_the_grid_runs_with_a_warning(node, load, caplog):
    model = load("bf16")
    with caplog.at_level(logging.WARNING, logger="h3_vortex"):
        latent, _ = node.execute(model, conditioning(), nested((1, 24, 3, 4, 4), (1, 32, 2, 8)), **schedule(model), seed=0).result
    assert "3 latent frames is not on the 5k+2 grid: use 2 or 7" in caplog.text
    assert latent["samples"].unbind()[0].shape[2] == 3


@pytest.fixture(scope="module")
def stored_conditioning(base_dir):
    """A conditioning that core's LoadTrainingDataset reads, so that a graph needs no text encoder."""
    folder = base_dir / "datasets" / "h3_denoise"
    folder.mkdir(parents=True, exist_ok=True)
    shard = {"latents": [{"samples": torch.zeros(1, 24, 2, 2, 2)}], "conditioning": [conditioning()]}
    torch.save(shard, folder / "shard_0000.pkl")
    (folder / "metadata.json").write_text('{"num_samples": 1}')
    return "h3_denoise"


def sampling_graph(tiny_models, stored, steps, width, frames, seed):
    link = {"model": ["unet", 0], "sampler": ["sampler", 0], "sigmas": ["sigmas", 0]}
    return {
        "unet": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": tiny_models["pruned_nvfp4"].name, "weight_dtype": "default"},
        },
        "stored": {"class_type": "LoadTrainingDataset", "inputs": {"folder_name": stored}},
        "empty": {
            "class_type": "EmptyMiniMaxH3LatentAV",
            "inputs": {"width": width, "height": width, "length": frames},
        },
        "sampler": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
        "sigmas": {
            "class_type": "BasicScheduler",
            "inputs": {"model": ["unet", 0], "scheduler": "simple", "steps": steps, "denoise": 1.0},
        },
        "denoise": {
            "class_type": "H3VortexDenoise",
            "inputs": {**link, "positive": ["stored", 1], "latent": ["empty", 0], "seed": seed},
        },
        "show": {"class_type": "PreviewAny", "inputs": {"source": ["denoise", 1]}},
    }


def test_interrupt_in_mid_sampling_then_queue_again(server, tiny_models, stored_conditioning):
    """The interrupt ends the run between two steps; the same server then gives the bytes of an undisturbed run."""
    small = sampling_graph(tiny_models, stored_conditioning, steps=3, width=64, frames=5, seed=1)
    undisturbed = server.queue(small)
    assert undisturbed.ok, undisturbed.message()
    before = json.loads(undisturbed.outputs["denoise"]["text"][0])

    long = sampling_graph(tiny_models, stored_conditioning, steps=1000, width=256, frames=39, seed=2)
    asked = []

    def stop_at_step_three(kind, data):
        if kind == "progress" and data.get("node") == "denoise" and data["value"] >= 3 and not asked:
            asked.append(threading.Thread(target=server.interrupt))  # the callback runs inside the client's event loop
            asked[0].start()

    began = time.monotonic()
    result = server.queue(long, on_event=stop_at_step_three, timeout=300)
    asked[0].join()
    assert result.interrupted and result.error["node_id"] == "denoise", result.message()
    steps = [e["data"]["value"] for e in result.events if e["type"] == "progress" and e["data"].get("node") == "denoise"]
    assert max(steps) < 1000 and time.monotonic() - began < 120

    again = server.queue(sampling_graph(tiny_models, stored_conditioning, steps=3, width=64, frames=5, seed=2))
    assert again.ok, again.message()
    after = json.loads(server.queue(small).outputs["denoise"]["text"][0])
    assert after["video_sha256"] == before["video_sha256"] and after["audio_sha256"] == before["audio_sha256"]
    assert json.loads(again.outputs["denoise"]["text"][0])["video_sha256"] != before["video_sha256"]

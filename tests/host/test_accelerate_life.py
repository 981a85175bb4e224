"""The patch over the life of a process: clones, undoing, bypass, unloading, interrupts, many runs."""

import gc

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample

EAGER = Features(allow_eager=True)
STEPS = 4


@pytest.fixture(scope="module")
def model(comfy, tiny_models):
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_bf16"]))
    yield patcher
    comfy.model_management.unload_all_models()


@pytest.fixture(scope="module")
def api(comfy):
    from h3_vortex.kernels.patch import comfyui

    return comfyui


@pytest.fixture(scope="module")
def expected(model):
    return sample(model, conditioning("all"))


def test_patched_plain_patched(model, api, expected):
    patched = api.accelerate(model, EAGER)
    for patcher in (patched, model, patched, model):
        assert same(sample(patcher, conditioning("all")), expected)
    assert api.report(patched)["model_calls"] == 2 * STEPS


def test_the_patcher_given_is_not_changed(model, api):
    before = (dict(model.wrappers), dict(model.attachments), dict(model.object_patches), dict(model.model_options))
    api.accelerate(model, EAGER)
    assert (dict(model.wrappers), dict(model.attachments), dict(model.object_patches), dict(model.model_options)) == before
    with pytest.raises(ValueError, match="not accelerated"):
        api.report(model)


def test_two_clones_count_for_themselves(model, api, expected):
    one, two = api.accelerate(model, EAGER), api.accelerate(model, EAGER)
    assert same(sample(one, conditioning("all")), expected)
    assert same(sample(two, conditioning("all"), steps=2), sample(model, conditioning("all"), steps=2))
    assert same(sample(one, conditioning("all")), expected)
    assert api.report(one)["model_calls"] == 2 * STEPS and api.report(two)["model_calls"] == 2


def test_twice_is_once(model, api, expected):
    twice = api.accelerate(api.accelerate(model, EAGER), EAGER)
    assert same(sample(twice, conditioning("all")), expected)
    told = api.report(twice)
    assert told["model_calls"] == STEPS and fused(told, "norm_modulate") == STEPS * len(model.model.diffusion_model.blocks)
    assert all(len(entries) == 1 for kind in twice.wrappers.values() for key, entries in kind.items() if key == api.KEY)


def test_a_clone_of_the_clone_reports_with_it(model, api):
    patched = api.accelerate(model, EAGER)
    sample(patched.clone(), conditioning(), steps=1)
    assert api.report(patched)["model_calls"] == 1


def test_node_off_is_the_same_object(model, comfy):
    from h3_vortex.nodes.accelerate import H3VortexAccelerate

    out, text = H3VortexAccelerate.execute(model, "off", "stock (exact)").result
    assert out is model and text == '{"mode": "off"}'


def test_node_switches_are_the_features(comfy):
    from dataclasses import fields

    from h3_vortex.nodes.accelerate import SWITCHES

    assert set(SWITCHES) == {field.name for field in fields(Features)} - {"allow_eager"}


def test_node_advanced_switches_reach_the_model(model, comfy, monkeypatch):
    from h3_vortex.nodes import accelerate as node

    seen = []
    monkeypatch.setattr(node, "accelerate", lambda m, features, attention, mode: seen.append((features, attention, mode)) or m.clone())
    monkeypatch.setattr(node, "report", lambda m: {})
    node.H3VortexAccelerate.execute(model, "advanced", "stock (exact)", **dict.fromkeys(node.SWITCHES, True) | {"rope": False})
    node.H3VortexAccelerate.execute(model, "exact", "stock (exact)", **dict.fromkeys(node.SWITCHES, False))
    assert seen == [(Features(rope=False), "stock (exact)", "advanced"), (Features(), "stock (exact)", "exact")]


def test_unknown_attention_names_the_choices(model, api):
    with pytest.raises(ValueError, match="'fastest' is unknown; there are"):
        api.accelerate(model, EAGER, attention="fastest")


def test_another_model_is_refused(comfy, api):
    class Patcher:
        class model:
            diffusion_model = torch.nn.Linear(1, 1)

        def clone(self):
            return self

        def set_attachments(self, key, value):
            pass

    with pytest.raises(ValueError, match="got a Linear: connect an H3"):
        api.accelerate(Patcher(), EAGER)


def test_unload_and_run_again(model, api, expected, comfy):
    patched = api.accelerate(model, EAGER)
    assert same(sample(patched, conditioning("all")), expected)
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()
    assert same(sample(patched, conditioning("all")), expected)
    assert same(sample(model, conditioning("all")), expected)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("step", range(STEPS))
def test_interrupt_then_run_again(model, api, expected, comfy, step, block):
    """The user's cancel arrives inside block ``block`` of step ``step``."""
    patched = api.accelerate(model, EAGER)
    calls = iter(range(STEPS))
    linear = model.model.diffusion_model.blocks[block].mlp.fc1

    def cancel(*_):
        if next(calls) == step:
            comfy.model_management.interrupt_current_processing()

    handle = linear.register_forward_pre_hook(cancel)
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            sample(patched, conditioning("all"))
    finally:
        handle.remove()
        comfy.model_management.interrupt_current_processing(False)
    assert api.report(patched)["model_calls"] == step + 1
    assert same(sample(patched, conditioning("all")), expected)
    assert same(sample(model, conditioning("all")), expected)


def test_twenty_runs_leave_nothing_behind(model, api):
    patched = api.accelerate(model, EAGER)

    def alive():
        gc.collect()
        if torch.cuda.is_available():
            return torch.cuda.memory_allocated(), len(gc.get_objects())
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor), len(gc.get_objects())

    for _ in range(2):
        sample(patched, conditioning("all"), steps=1)
    tensors, objects = alive()
    for _ in range(20):
        sample(patched, conditioning("all"), steps=1)
    after_tensors, after_objects = alive()
    assert after_tensors == tensors
    assert after_objects - objects < 200, "objects pile up"
    assert api.report(patched)["model_calls"] == 22


def test_run_is_logged_once_and_reaches_the_status(model, api, caplog, comfy):
    import json
    import logging

    from h3_vortex.kernels.patch.report import status

    model_folder = comfy.models

    caplog.set_level(logging.INFO, "h3_vortex")
    patched = api.accelerate(model, EAGER)
    sample(patched, conditioning("all"))
    (line,) = [r.message for r in caplog.records if " run, " in r.message]
    assert "complete run, 4 model calls" in line and "attention" in line
    told = status()
    assert told["ready"] and told["last_run"]["complete"] and told["last_run"]["model_calls"] == STEPS
    text = json.dumps(told)
    assert not [part for part in (str(model_folder), ".safetensors", "site-packages", "/tmp") if part in text]


def test_warmup_runs_one_step_and_passes_the_model(model, api, comfy):
    import json

    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV
    from h3_vortex.nodes.warmup import H3VortexWarmup

    patched = api.accelerate(model, EAGER)
    with torch.inference_mode():
        (latent,) = EmptyMiniMaxH3LatentAV.execute(64, 64, 5).result
        before = [t.clone() for t in latent["samples"].unbind()]
        out, text = H3VortexWarmup.execute(patched, conditioning("all"), latent).result
    assert out is patched and json.loads(text)["model_calls"] == 1
    assert same(list(latent["samples"].unbind()), before)
    with torch.inference_mode():
        out, text = H3VortexWarmup.execute(model, conditioning(), latent).result
    assert out is model and json.loads(text)["mode"] == "off"

"""Public reports that show in a running model: see ``tests/reports/README.md``."""

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample

EAGER = Features(allow_eager=True)


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


def test_report_73_what_the_sampler_gives_is_not_written_to(model, api):
    """EasyCache and its like hand the same tensors in again: a changed one makes the sound quiet."""
    from comfy.patcher_extension import WrappersMP

    seen = []

    def watch(executor, x, timestep, context, *args, **kwargs):
        given = [*x, timestep, context]
        before = [tensor.clone() for tensor in given]
        out = executor(x, timestep, context, *args, **kwargs)
        seen.append(same(given, before) and not any(o.data_ptr() == g.data_ptr() for o in out for g in given))
        return out

    patched = api.accelerate(model, EAGER)
    patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "watch", watch)
    sample(patched, conditioning("all"), steps=2)
    assert seen == [True, True] and fused(api.report(patched), "gate_norm_modulate")


@pytest.mark.parametrize("name", ["lcm", "dpmpp_2m", "res_multistep", "uni_pc", "euler_ancestral", "heunpp2"])
def test_report_74_no_sampler_is_singled_out(model, api, name):
    patched = api.accelerate(model, EAGER)
    expected = sample(model, conditioning(), steps=2, sampler=name)
    assert same(sample(patched, conditioning(), steps=2, sampler=name), expected)
    told = api.report(patched)
    assert told["stepped_aside"] is None and fused(told, "gate_norm_modulate") == 2 * told["model_calls"]


def test_report_76_every_step_runs_every_block(model, api):
    """No step is answered from another one: with four steps such caches hit nothing, or cost picture."""
    patched = api.accelerate(model, EAGER)
    sample(patched, conditioning(), steps=4)
    told = api.report(patched)
    assert told["model_calls"] == 4 and fused(told, "gate_norm_modulate") == 4 * len(model.model.diffusion_model.blocks)


def test_report_40_latents_of_every_kind_are_taken_or_refused_by_name(comfy):
    """Core's nested latent is H3's; where both streams are needed, a video or a sound alone is refused and says what to connect."""
    from comfy.nested_tensor import NestedTensor
    from h3_vortex.nodes import checks

    video, audio = torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8)
    assert [t.shape for t in checks.h3_latent("Node", "latent", {"samples": NestedTensor((video, audio))})] == [video.shape, audio.shape]
    for alone in (video, audio, NestedTensor((video,)), NestedTensor((audio, video)), NestedTensor((video, audio, audio))):
        with pytest.raises(ValueError, match="the latent on 'latent' is not a MiniMax H3 latent: it.*Make it with H3 Conditioning"):
            checks.h3_latent("Node", "latent", {"samples": alone})


def test_report_69_beta_with_res_is_not_the_default(comfy):
    """And what can be chosen is core's own, to the byte (see ``test_sampler.py``)."""
    from h3_vortex.nodes.sampler import H3VortexSampler

    defaults = {entry.id: getattr(entry, "default", None) for entry in H3VortexSampler.define_schema().inputs}
    assert (defaults["sampler"], defaults["schedule"], defaults["eta"]) == ("res_multistep", "simple", 0.0)


def test_report_25_the_core_that_ran_is_in_the_report(model, api):
    from h3_vortex.nodes import host

    assert api.report(api.accelerate(model, EAGER))["core"] == host.version()


@pytest.mark.parametrize("stepped_aside", [False, True])
def test_reports_33_36_90_where_the_weights_were_is_in_the_report(model, api, monkeypatch, stepped_aside):
    """Asked of the patcher that samples, at the end of every model call; on the CPU nothing is streamed and nothing is said."""
    from h3_vortex.kernels.patch import report

    patched = api.accelerate(model, Features() if stepped_aside else EAGER)
    sample(patched, conditioning(), steps=1)
    told = api.report(patched)
    assert told["weights"] is None and bool(told["stepped_aside"]) == stepped_aside and "resident" not in report.glance(told)
    asked = []

    def half(patcher):
        asked.append(patcher.model is model.model)
        return {"resident_bytes": patcher.loaded_size() // 2, "bytes": patcher.model_size()}

    monkeypatch.setattr(report, "residency", half)
    sample(patched, conditioning(), steps=2)
    told = api.report(patched)
    assert asked == [True, True] and told["weights"]["bytes"] == model.model_size() > 0
    assert report.glance(told).splitlines()[-1].startswith("weights are streamed: ")

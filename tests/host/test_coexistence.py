"""Several other packs at once on one model, in every combination: what they do together they still do under H3 Accelerate.

Each double alone, and what the report says of it: ``test_accelerate_foreign.py``.
"""

import itertools

import pytest
import torch
from h3_vortex.tests.host import test_accelerate_foreign as doubles
from h3_vortex.tests.host.sampling import fused, same, sample, stock

KINDS, EAGER = doubles.KINDS, doubles.EAGER
STEPS = 1
model, api = doubles.model, doubles.api


def attention_override(func, *args, **kwargs):
    """As packs set it: called with the function that would have run."""
    return func(*args, **kwargs) * 1.03125


def apply(kinds, patcher):
    """A clone of ``patcher`` with the doubles of ``kinds``; the object patch first, as it clones by itself."""
    if "forward" in kinds:
        foreign = doubles.object_patch(patcher, ".attn", lambda self, original, x, **kw: original(x, **kw) * 1.0625)
    else:
        foreign = patcher.clone()
    if "override" in kinds:
        foreign.model_options["transformer_options"]["optimized_attention_override"] = attention_override
    if "block" in kinds:
        for index in range(len(patcher.model.diffusion_model.blocks)):
            foreign.set_model_patch_replace(doubles.block_patch(1.015625), "dit", "double_block", index)
    return foreign


ALL = [set(kinds) for size in (2, 3) for kinds in itertools.combinations(("forward", "override", "block"), size)]


@pytest.mark.parametrize("kinds", ALL, ids="+".join)
def test_doubles_together(model, api, kinds):
    foreign = apply(kinds, model)
    expected = sample(foreign, KINDS, steps=STEPS)
    alone = [sample(apply({kind}, model), KINDS, steps=STEPS) for kind in kinds] if len(kinds) == 3 else []
    assert not any(same(expected, one) for one in alone), "a double has no effect of its own"
    patched = api.accelerate(foreign, EAGER)
    assert same(sample(patched, KINDS, steps=STEPS), expected)
    told = api.report(patched)
    blocks = STEPS * len(model.model.diffusion_model.blocks)
    assert told["stepped_aside"] is None and fused(told, "gate_norm_modulate") == fused(told, "swiglu") == blocks
    assert bool(stock(told, "attention")) == ("forward" in kinds)
    if kinds == {"override", "block"}:
        assert told["attention"]["chosen_by"] == "override"
    assert same(sample(foreign, KINDS, steps=STEPS), expected), "the other packs' own model was changed"


def test_report_88_importing_the_pack_changes_nothing_of_comfyuis(comfy):
    """Import-time patches are what other packs refuse to stack on."""
    import importlib
    import sys

    import comfy.ldm.minimax.model as core_model
    import comfy.ldm.modules.attention as core_attention
    import comfy.model_base as core_base

    watched = (core_model, core_attention, core_base, core_model.DiTBlock, core_model.Attention, core_model.MLP, core_base.MiniMaxH3)
    before = [dict(vars(holder)) for holder in watched]
    for name in sorted(name for name in sys.modules if name.startswith("h3_vortex.nodes") or name.startswith("h3_vortex.kernels.patch")):
        if not name.endswith(("verification", "report")):  # they hold this process's verdicts and sessions
            spec = importlib.util.find_spec(name)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert [dict(vars(holder)) for holder in watched] == before
    sources = {getattr(value, "__module__", "") or "" for holder in watched for value in vars(holder).values() if callable(value)}
    assert not [source for source in sources if "vortex" in source.lower()]


def test_a_turbo_lora_beside_the_doubles(model, api, tiny_models, tmp_path):
    """Rows 18 and 19: other packs' attention, a LoRA beside the layers, and the patch."""
    from h3_vortex.h3 import turbo
    from h3_vortex.kernels.patch import side_path
    from h3_vortex.tests.host import turbo_file

    tensors = turbo_file.comfy_tensors(turbo_file.layers(model.model.diffusion_model), alpha=8)
    with_lora = side_path.attach(model, turbo.read(tensors, {}).adapters, 1.0)
    foreign = apply({"override", "block"}, with_lora)
    expected = sample(foreign, KINDS, steps=STEPS)
    assert not same(expected, sample(apply({"override", "block"}, model), KINDS, steps=STEPS)), "the LoRA does nothing"
    patched = api.accelerate(foreign, EAGER)
    assert same(sample(patched, KINDS, steps=STEPS), expected)
    assert torch.isfinite(expected[0]).all() and fused(api.report(patched), "gate_norm_modulate")

"""The attention input of H3 Accelerate in this process: one plan per run, other choices respected, names insisted on."""

import pytest
import torch
from h3_vortex.kernels import attention
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, same, sample

EAGER = Features(allow_eager=True)


@pytest.fixture(scope="module")
def model(comfy, tiny_models):
    with torch.inference_mode():
        return comfy.sd.load_diffusion_model(str(tiny_models["bf16"]))


@pytest.fixture(scope="module")
def expected(model):
    return sample(model, conditioning("all"))


def accelerated(model, choice):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    patched = accelerate(model, EAGER, choice)
    return patched, lambda: report(patched)["attention"]


def overridden(model, name):
    """As the Model Attention Backend node does it."""
    from comfy.ldm.modules.attention import get_attention_function

    clone = model.clone()
    clone.set_model_optimized_attention(get_attention_function(name))
    return clone


@pytest.fixture(scope="module")
def torch_attention(model):
    """Stock's result with ``attention_pytorch``, which on a CPU ends in the kernel that sdpa_flash names."""
    return sample(overridden(model, "pytorch"), conditioning("all"))


def test_a_backend_by_name_runs_in_every_block(model, torch_attention):
    patched, told = accelerated(model, "sdpa_flash")
    blocks = len(model.model.diffusion_model.blocks)
    result = sample(patched, conditioning("all"))
    assert told()["backend"] == "sdpa_flash" and told()["class"] == "E1" and told()["chosen_by"] == "this node"
    assert told()["why"] == "asked for by name" and all(0 < error < 0.01 for error in told()["relative_error"].values())
    from h3_vortex.kernels.patch.comfyui import session_of

    (plan,) = session_of(patched).attention_plans.values()
    assert plan.calls == 4 * blocks
    assert same(result, torch_attention)


def test_every_run_makes_its_own_plan(model):
    from h3_vortex.kernels.patch.comfyui import session_of

    patched, _ = accelerated(model, "sdpa_flash")
    plans = []
    for _ in range(2):
        sample(patched, conditioning("text"), steps=1)
        plans += session_of(patched).attention_plans.values()
    assert len(plans) == 2 and plans[0] is not plans[1]


def test_head_slices_are_the_same_picture(model, torch_attention):
    patched, told = accelerated(model, "head_sliced:sdpa_flash")
    assert same(sample(patched, conditioning("all")), torch_attention) and told()["backend"] == "head_sliced:sdpa_flash"


def test_fastest_dense_on_a_cpu_is_stock(model, expected):
    patched, told = accelerated(model, attention.FASTEST)
    assert same(sample(patched, conditioning("all")), expected)
    assert told()["class"] == "E0" and told()["why"] == "nothing to measure without a CUDA device"


@pytest.mark.parametrize("name", ["kitchen_int8", "sage2", "sdpa_cudnn", "flash_attn2"])
def test_a_backend_that_cannot_run_here_raises_at_the_node(model, name):
    with pytest.raises(attention.AttentionUnavailable, match=f"H3 attention: {name} "):
        accelerated(model, name)
    with pytest.raises(ValueError, match="unknown"):
        accelerated(model, "sage9")


def test_report_20_an_override_goes_first_and_two_names_are_not_guessed_between(model):
    other = overridden(model, "split")
    wanted = sample(other, conditioning("text"))
    for choice in (attention.STOCK, attention.FASTEST):
        patched, told = accelerated(other, choice)
        assert same(sample(patched, conditioning("text")), wanted)
        assert (told()["backend"], told()["chosen_by"], told()["class"]) == ("attention_split", "override", "E0")
    assert "override (attention_split)" in told()["why"]
    patched, _ = accelerated(other, "sdpa_flash")
    with pytest.raises(attention.AttentionUnavailable, match=r"two nodes choose it: an attention override \(attention_split\)"):
        sample(patched, conditioning("text"))


def test_a_name_is_not_lost_when_the_model_runs_unpatched(model):
    from h3_vortex.kernels.patch.comfyui import accelerate

    patched = accelerate(model, Features(), "sdpa_flash")  # no kernel for the CPU without allow_eager
    with pytest.raises(attention.AttentionUnavailable, match="sdpa_flash was asked for, but: .*no accelerated kernel for cpu"):
        sample(patched, conditioning("text"))


def _own_attention_forward(block):
    forward = block.attn.forward
    block.attn.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return lambda: vars(block.attn).pop("forward")


def _hook_on_the_block(block):
    return block.register_forward_hook(lambda *_: None).remove


@pytest.mark.parametrize("other", [_own_attention_forward, _hook_on_the_block])
def test_a_name_is_not_lost_in_one_block(model, other):
    """One block that another pack owns would mix two attentions in one picture, and the report would name only one of them."""
    block = model.model.diffusion_model.blocks[-1]
    undo = other(block)
    try:
        for choice in (attention.STOCK, attention.FASTEST):
            expected = sample(model, conditioning("text"))
            assert same(sample(accelerated(model, choice)[0], conditioning("text")), expected)
        patched, _ = accelerated(model, "sdpa_flash")
        with pytest.raises(attention.AttentionUnavailable, match="sdpa_flash was asked for, but: .*forward"):
            sample(patched, conditioning("text"))
    finally:
        undo()
    result = sample(patched, conditioning("text"))  # nothing is left of the refusal
    assert same(result, sample(accelerated(model, "sdpa_flash")[0], conditioning("text")))


def test_a_name_is_not_lost_to_a_block_patch_that_brings_attention(model):
    from h3_vortex.kernels.patch.comfyui import accelerate

    def patch(args, extra):
        return extra["original_block"]({**args, "attention": lambda h, **_: torch.zeros_like(h)})

    other = model.clone()
    other.set_model_patch_replace(patch, "dit", "double_block", 1)
    with pytest.raises(attention.AttentionUnavailable, match="sdpa_flash was asked for, but: another node supplies the attention"):
        sample(accelerate(other, EAGER, "sdpa_flash"), conditioning("text"))


def test_report_10_a_removed_node_leaves_stock(model, expected):
    patched, _ = accelerated(model, "sdpa_flash")
    sample(patched, conditioning("text"), steps=1)
    assert same(sample(model, conditioning("all")), expected)

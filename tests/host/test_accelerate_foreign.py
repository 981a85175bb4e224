"""Other packs' patches on the same model: what each does alone it still does under H3 Accelerate, and the report says who owns what."""

import types

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock

EAGER = Features(allow_eager=True)
KINDS = conditioning("all")
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
def plain(model):
    return sample(model, KINDS)


def blocks(patcher):
    return STEPS * len(patcher.model.diffusion_model.blocks)


def check(api, foreign, plain, changes=True):
    """The foreign patcher alone and accelerated give the same bytes; returns the report."""
    expected = sample(foreign, KINDS)
    assert same(expected, plain) != changes
    patched = api.accelerate(foreign, EAGER)
    assert same(sample(patched, KINDS), expected)
    return api.report(patched)


def object_patch(model, name, forward):
    """A clone whose ``blocks.*.<name>`` runs ``forward(module, original, ...)``, as memory-efficient attention packs patch it."""
    clone = model.clone()
    for index in range(len(model.model.diffusion_model.blocks)):
        path = f"diffusion_model.blocks.{index}{name}"
        module = model.get_model_object(path)
        original = type(module).forward

        def replaced(self, *args, _original=original, **kwargs):
            return forward(self, lambda *a, **k: _original(self, *a, **k), *args, **kwargs)

        clone.add_object_patch(f"{path}.forward", types.MethodType(replaced, module))
    return clone


def test_attention_forward_replaced(model, api, plain):
    foreign = object_patch(model, ".attn", lambda self, original, x, **kw: original(x, **kw) * 1.5)
    told = check(api, foreign, plain)
    (reason,) = stock(told, "attention")
    assert "Attention.forward is" in reason and "object_patch" in reason
    assert fused(told, "qk_norm_rope") == 0 and fused(told, "swiglu") == blocks(model)
    assert fused(told, "norm_modulate") == fused(told, "gate_norm_modulate") == blocks(model)
    assert same(sample(model, KINDS), plain), "the object patch stayed"
    after = api.accelerate(model, EAGER)
    assert same(sample(after, KINDS), plain)
    assert fused(api.report(after), "qk_norm_rope") == blocks(model), "an undone patch still counts as foreign"


def test_mlp_forward_replaced(model, api, plain):
    def chunked(self, original, x):
        return torch.cat([original(part) * 1.25 for part in x.split(13)])

    told = check(api, object_patch(model, ".mlp", chunked), plain)
    (reason,) = stock(told, "mlp")
    assert "MLP.forward is" in reason
    assert fused(told, "swiglu") == 0 and fused(told, "qk_norm_rope") == blocks(model)


@pytest.mark.parametrize("name", [".attn", ".mlp"])
def test_a_branch_in_a_wider_dtype(model, api, plain, name):
    """Stock adds it to the stream as torch does; no op of the pack takes it."""
    told = check(api, object_patch(model, name, lambda self, original, *args, **kw: original(*args, **kw).double() * 1.5), plain)
    (reason,) = stock(told, "gate")
    assert reason.startswith("the branch is torch.float64 [")
    assert fused(told, "gate_norm_modulate") == (0 if name == ".attn" else blocks(model)) and fused(told, "norm_modulate") >= blocks(model)


def test_block_forward_replaced(model, api, plain):
    def forward(self, original, x, t_emb, mod_segments, rope_freqs, transformer_options):
        return original(x, t_emb * 1.1, mod_segments, rope_freqs, transformer_options)

    told = check(api, object_patch(model, "", forward), plain)
    (reason,) = stock(told, "block")
    assert "DiTBlock.forward is" in reason
    assert not any(fused(told, op) for op in told["ops"])


@pytest.mark.parametrize("name", ["attn", "mlp", "norm1"])
def test_hooks_are_called(model, api, plain, name):
    seen = []
    handles = [
        block.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(1) or out * 1.25)
        for block in model.model.diffusion_model.blocks]
    try:
        expected = sample(model, KINDS)
        count = len(seen)
        patched = api.accelerate(model, EAGER)
        assert same(sample(patched, KINDS), expected) and not same(expected, plain)
        assert len(seen) == 2 * count
        assert any("forward hooks" in reason for op in api.report(patched)["ops"] for reason in stock(api.report(patched), op))
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["norm1", "norm2"])
def test_a_norm_in_a_wider_dtype(model, api, name):
    """Stock rounds the tables of a curve model to the dtype of what the norm gives, which need not be the stream's."""
    half = model.clone()
    half.set_model_compute_dtype(torch.bfloat16)
    plain = sample(half, KINDS)
    norms = [block.get_submodule(name) for block in half.model.diffusion_model.blocks]
    handles = [norm.register_forward_hook(lambda module, args, out: out.float()) for norm in norms]
    try:
        told = check(api, half, plain)
        assert told["stepped_aside"] is None and fused(told, "gate") >= blocks(model)
    finally:
        for handle in handles:
            handle.remove()


def block_patch(scale):
    """A double_block replacement that changes the stream after the block, in place, as a ControlNet does."""

    def patch(args, extra):
        out = extra["original_block"](args)
        assert out["img"] is args["img"]
        out["img"].mul_(scale)
        return out

    return patch


def test_block_patch_is_chained(model, api, plain):
    foreign = model.clone()
    for index in range(len(model.model.diffusion_model.blocks)):
        foreign.set_model_patch_replace(block_patch(1.01), "dit", "double_block", index)
    told = check(api, foreign, plain)
    assert fused(told, "gate_norm_modulate") == blocks(model)


def test_block_patch_set_after_accelerate_is_chained(model, api, plain):
    foreign = model.clone()
    foreign.set_model_patch_replace(block_patch(1.01), "dit", "double_block", 0)
    expected = sample(foreign, KINDS)
    patched = api.accelerate(model, EAGER)
    patched.set_model_patch_replace(block_patch(1.01), "dit", "double_block", 0)
    assert same(sample(patched, KINDS), expected) and not same(expected, plain)
    assert fused(api.report(patched), "gate_norm_modulate") == blocks(model)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_wrapper_that_installs_block_patches(model, api, plain, comfy, order):
    """Newer cores' ControlNet: a DIFFUSION_MODEL wrapper that puts its own entries in front of those present."""
    from comfy.patcher_extension import WrappersMP

    def controlnet(executor, x, timestep, context, transformer_options={}, *args, **kwargs):  # noqa: B006
        options = transformer_options.copy()
        options["patches_replace"] = replaced = dict(options.get("patches_replace", {}))
        replaced["dit"] = entries = dict(replaced.get("dit", {}))
        previous = entries.get(("double_block", 1))

        def patch(inner, extra):
            out = previous(inner, extra) if previous else extra["original_block"](inner)
            out["img"].add_(0.125)
            return out

        entries["double_block", 1] = patch
        return executor(x, timestep, context, options, *args, **kwargs)

    foreign = model.clone()
    foreign.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "controlnet", controlnet)
    expected = sample(foreign, KINDS)
    assert not same(expected, plain)
    if order == "before":
        patched = api.accelerate(foreign, EAGER)
    else:
        patched = api.accelerate(model, EAGER)
        patched.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "controlnet", controlnet)
    assert same(sample(patched, KINDS), expected)
    assert fused(api.report(patched), "gate_norm_modulate") == blocks(model)


def test_patch_that_sends_attention(model, api, plain):
    """Newer cores' sparse attention: the replacement calls the original block with an ``attention`` of its own."""
    foreign, calls = model.clone(), []
    for index, block in enumerate(model.model.diffusion_model.blocks):
        def attention(h, rope_freqs=None, transformer_options={}, block=block):  # noqa: B006
            calls.append(1)
            return block.attn(h, rope_freqs=rope_freqs, transformer_options=transformer_options)

        def patch(args, extra, attention=attention):
            return extra["original_block"]({**args, "attention": attention})

        foreign.set_model_patch_replace(patch, "dit", "double_block", index)
    patched = api.accelerate(foreign, EAGER)
    assert same(sample(patched, KINDS), plain)
    assert len(calls) == blocks(model)
    told = api.report(patched)
    assert list(stock(told, "attention")) == ["another node supplies the attention"]
    assert fused(told, "qk_norm_rope") == 0 and fused(told, "gate_norm_modulate") == fused(told, "swiglu") == blocks(model)


def test_an_argument_nobody_knows_yet_runs_the_stock_block(model, api, plain):
    foreign = model.clone()
    foreign.set_model_patch_replace(
        lambda args, extra: extra["original_block"]({**args, "temperature": 2}), "dit", "double_block", 0)
    told = check(api, foreign, plain, changes=False)
    assert stock(told, "block") == {"unknown block argument 'temperature'": STEPS}
    assert fused(told, "gate_norm_modulate") == blocks(model) - STEPS


def test_a_patch_with_segments_of_its_own(model, api, plain):
    foreign = model.clone()
    for index in range(len(model.model.diffusion_model.blocks)):
        def patch(args, extra):
            first, *rest = args["mod_segments"]
            return extra["original_block"]({**args, "mod_segments": [(first[0], first[1], rest[-1][2]), *rest]})

        foreign.set_model_patch_replace(patch, "dit", "double_block", index)
    told = check(api, foreign, plain)
    assert fused(told, "gate_norm_modulate") == blocks(model)


def test_attention_override_is_used(model, api, plain):
    from comfy.ldm.modules import attention

    seen = []

    def backend(q, k, v, heads, **kwargs):
        seen.append((q.shape, sorted(kwargs)))
        return attention.attention_pytorch(q, k, v, heads, **kwargs) * 1.25

    foreign = model.clone()
    foreign.set_model_optimized_attention(backend)
    told = check(api, foreign, plain)
    half = len(seen) // 2
    assert half == blocks(model) and seen[:half] == seen[half:]
    assert told["attention"]["backend"] == "backend" and told["attention"]["chosen_by"] == "override"


def test_attention_override_with_containers(model, api, plain):
    from comfy.ldm.modules import attention

    def override(func, *args, **kwargs):
        raise AssertionError("the container form was not used")

    def containers(q, k, v, heads, **kwargs):
        return attention.attention_pytorch(q.take(), k.take(), v.take(), heads, **kwargs) * 0.75

    override.container_function = containers
    foreign = model.clone()
    foreign.model_options["transformer_options"]["optimized_attention_override"] = override
    check(api, foreign, plain)


def test_training_is_left_alone(model, api, plain, comfy, monkeypatch):
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    patched = api.accelerate(model, EAGER)
    expected = sample(model, KINDS)
    assert same(sample(patched, KINDS), expected)
    assert "training" in api.report(patched)["stepped_aside"]

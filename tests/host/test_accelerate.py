"""H3 Accelerate in this process: patched latents are stock latents, byte for byte, for every storage form of the checkpoint."""

import pytest
import torch
from h3_vortex.h3.tiny import FORMATS
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host import lora
from h3_vortex.tests.host.sampling import conditioning, fused, fused_forms, same, sample, stock

EAGER = Features(allow_eager=True)  # this tier runs on the CPU, where every op has its reference only


@pytest.fixture(scope="module")
def load(comfy, tiny_models):
    """Loads a tiny checkpoint by format name, once per module."""
    loaded = {}

    def get(name):
        if name not in loaded:
            with torch.inference_mode():  # as ComfyUI loads and runs
                loaded[name] = comfy.sd.load_diffusion_model(str(tiny_models[name]))
        return loaded[name]

    yield get
    comfy.model_management.unload_all_models()


def accelerated(model):
    from h3_vortex.kernels.patch.comfyui import accelerate

    return accelerate(model, EAGER)


def report(patcher):
    from h3_vortex.kernels.patch import comfyui

    return comfyui.report(patcher)


@pytest.mark.parametrize("kinds", ["text", "keyframes", "references", "all"])
@pytest.mark.parametrize("name", FORMATS)
def test_patched_is_stock(load, name, kinds):
    model, positive = load(name), conditioning(kinds)
    expected = sample(model, positive)
    patched = accelerated(model)
    assert same(sample(patched, positive), expected)
    told = report(patched)
    assert told["stepped_aside"] is None and told["model_calls"] == 4
    blocks = 4 * len(model.model.diffusion_model.blocks)
    for op in ("norm_modulate", "gate_norm_modulate", "gate", "qk_norm_rope"):
        assert fused_forms(told, op) == blocks, told["ops"]
    folded = 0 if name.endswith("int8_convrot") and told["device"] == "cpu" else blocks  # there stock folds the activation into FC2
    assert fused_forms(told, "swiglu") == folded


def test_different_conditioning_gives_different_latents(load):
    model = load("bf16")
    a, b = (sample(accelerated(model), conditioning(kinds)) for kinds in ("text", "all"))
    assert not same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bf16", "pruned_nvfp4", "fp8_scaled"])
def test_patched_is_stock_in_half_precision(load, name, dtype):
    model = load(name).clone()
    model.set_model_compute_dtype(dtype)
    expected = sample(model, conditioning("all"))
    patched = accelerated(model)
    assert same(sample(patched, conditioning("all")), expected)
    told = report(patched)
    assert told["stepped_aside"] is None and fused(told, "gate_norm_modulate")


@pytest.mark.parametrize("how", ["baked", "lowvram"])
@pytest.mark.parametrize("name", ["bf16", "pruned_bf16", "nvfp4", "pruned_int8_convrot", "fp8_scaled"])
def test_lora_keeps_its_effect_and_its_bytes(load, monkeypatch, name, how):
    comfy_model = load(name)
    plain = sample(comfy_model, conditioning("all"))
    if how == "lowvram":
        lora.keep_weights_out(monkeypatch)
    model = lora.add(comfy_model)
    expected = sample(model, conditioning("all"))
    assert not same(expected, plain), "the LoRA does nothing"
    patched = accelerated(model)
    assert same(sample(patched, conditioning("all")), expected)
    told = report(patched)
    assert told["stepped_aside"] is None and fused_forms(told, "norm_modulate")
    functions = comfy_model.model.diffusion_model.blocks[0].attn.qkv_proj.weight_function
    assert bool(functions) == (how == "lowvram")
    monkeypatch.undo()
    assert same(sample(comfy_model, conditioning("all")), plain), "the LoRA stayed"


def test_lora_after_accelerate(load):
    """The order of the two nodes does not matter."""
    model = load("pruned_nvfp4")
    expected = sample(lora.add(model), conditioning("all"))
    patched = lora.add(accelerated(model))
    assert same(sample(patched, conditioning("all")), expected)
    assert fused(report(patched), "norm_modulate")


@pytest.mark.parametrize("feature", ["norm", "gate", "rope", "swiglu"])
def test_one_group_left_out(load, feature):
    from dataclasses import replace

    from h3_vortex.kernels.patch.comfyui import accelerate

    model = load("pruned_bf16")
    patched = accelerate(model, replace(EAGER, **{feature: False}))
    assert same(sample(patched, conditioning("all")), sample(model, conditioning("all")))
    off = {"norm": "norm_modulate", "gate": "gate", "rope": "qk_norm_rope", "swiglu": "swiglu"}[feature]
    told = report(patched)
    assert fused(told, off) == 0 and list(stock(told, off)) == ["switched off"]


def test_without_a_kernel_the_model_runs_as_stock_and_says_so(load, comfy, caplog):
    from h3_vortex.kernels.patch.comfyui import accelerate

    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("this machine has a GPU with kernels: set H3_HOST_DEVICE=cpu")
    model = load("bf16")
    patched = accelerate(model)
    assert same(sample(patched, conditioning()), sample(model, conditioning()))
    told = report(patched)
    assert not told["ops"] and told["model_calls"] == 0
    assert "no accelerated kernel for cpu" in told["stepped_aside"]
    assert sum("no accelerated kernel for cpu" in r.message for r in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("curve", [False, True])
def test_a_block_of_the_real_widths(comfy, monkeypatch, curve):
    """5376 wide, 56 heads of 128, MLP 14336, bf16: one block, stock and ours, with bf16 and with fp32 modulation tables."""
    from h3_vortex.kernels.patch import checks, verification
    from h3_vortex.kernels.patch.core import probe
    from h3_vortex.kernels.patch.report import Session
    from h3_vortex.kernels.patch.runner import ModelCall

    monkeypatch.setattr(verification, "SAMPLE_ROWS", 40)
    core, device = probe(), comfy.model_management.get_torch_device()
    shape = {"adaln_curve_grid": 1025, "time_embed_dim": 8} if curve else {"time_embed_dim": 64}
    with torch.inference_mode():
        model = core.model.MiniMaxH3Model(
            num_layers=1, token_refiner_num_layers=0, time_embed_hidden_size=64, dtype=torch.bfloat16, device=device,
            operations=comfy.ops.disable_weight_init, **shape).requires_grad_(False)
        for parameter in model.blocks[0].parameters():
            torch.nn.init.normal_(parameter, 0 if parameter.dim() > 1 else 1, 0.02)
        block, call = model.blocks[0], ModelCall(core, Session("exact", "stock (exact)"), EAGER, None)
        ours, theirs = checks.block(core, model, block, lambda args: call.block(block, args, None), torch.bfloat16, device)
        assert verification.difference(ours, theirs) is None
    done = {op for op, _ in call.calls.fused}
    assert done >= {"norm_modulate", "gate_norm_modulate", "gate", "qk_norm_rope", "swiglu"}

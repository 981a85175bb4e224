"""The course of INT8-ConvRot layers through the runner, on the CPU with the pack's references in the place of kitchen's kernels."""

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host import int8_on_cpu, lora
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock

EAGER = Features(allow_eager=True)
PAIRS = ("norm_modulate_int8", "gate_norm_modulate_int8", "quantize_rotate_int8", "swiglu_int8")
STEPS = 4


@pytest.fixture(params=["int8_convrot", "pruned_int8_convrot"])
def model(request, comfy, tiny_models, monkeypatch):
    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("a CPU test: the real kernels are tested on CUDA; set H3_HOST_DEVICE=cpu")
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **kwargs: True)
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models[request.param]), model_options={"dtype": torch.bfloat16})
    assert patcher.model.get_dtype_inference() == torch.bfloat16
    plain = sample(patcher, conditioning("all"))
    int8_on_cpu.install(monkeypatch)
    assert not same(sample(patcher, conditioning("all")), plain), "stock did not take the emulated kernels"
    yield patcher
    int8_on_cpu.uninstall()
    comfy.model_management.unload_all_models()


@pytest.fixture(autouse=True)
def verdicts(monkeypatch):
    """Found here are forgotten after: they hold for the emulation only."""
    from h3_vortex.kernels.patch import verification

    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())
    monkeypatch.setattr(verification.cache, "read_json", lambda *_: None)
    monkeypatch.setattr(verification.cache, "write_json", lambda *_: True)


def run(model, features=EAGER, **keywords):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    patched = accelerate(model, features)
    return sample(patched, conditioning("all"), **keywords), report(patched), STEPS * len(model.model.diffusion_model.blocks)


def test_pairs_give_stock_bytes(model):
    out, told, blocks = run(model)
    assert same(out, sample(model, conditioning("all")))
    for op in PAIRS:
        assert fused(told, op) == blocks, told["ops"]
    assert fused(told, "norm_modulate") == fused(told, "gate_norm_modulate") == fused(told, "swiglu") == 0
    assert not any("quantised input" in op for op in told["ops"])


def test_stock_quantises_nothing_behind_our_back(model, monkeypatch):
    """After verification neither kitchen's ``int8_linear`` nor ComfyUI's folded activation is reached."""
    from h3_vortex.kernels.patch.comfyui import accelerate

    expected = sample(model, conditioning("all"))
    patched = accelerate(model, EAGER)
    sample(patched, conditioning("all"), steps=1)

    import comfy.ops
    import comfy_kitchen

    get, act = comfy_kitchen.registry.get_implementation, comfy.ops.linear_input_act
    second_layers = {block.mlp.fc2 for block in model.model.diffusion_model.blocks}

    def implementation(function, *args, **kwargs):
        assert function != "int8_linear", "stock ran"
        return get(function, *args, **kwargs)

    def folded(linear, *args, **kwargs):
        assert linear not in second_layers, "stock ran"
        return act(linear, *args, **kwargs)

    monkeypatch.setattr(comfy_kitchen.registry, "get_implementation", implementation)
    monkeypatch.setattr(comfy.ops, "linear_input_act", folded)
    assert same(sample(patched, conditioning("all")), expected)


def test_switched_off_is_stock(model):
    from dataclasses import replace

    out, told, blocks = run(model, replace(EAGER, int8=False))
    assert same(out, sample(model, conditioning("all")))
    assert all(fused(told, op) == 0 and stock(told, op) == {"switched off": blocks} for op in PAIRS)
    assert fused(told, "norm_modulate") == fused(told, "gate_norm_modulate") == blocks


def test_baked_lora_keeps_the_pairs(model):
    with_lora = lora.add(model)
    expected = sample(with_lora, conditioning("all"))
    assert not same(expected, sample(model, conditioning("all")))
    out, told, blocks = run(with_lora)
    assert same(out, expected)
    assert all(fused(told, op) == blocks for op in PAIRS)


def test_lora_in_each_call_takes_the_stock_linear(model, monkeypatch):
    lora.keep_weights_out(monkeypatch)
    with_lora = lora.add(model, ("attn.qkv_proj", "mlp.fc2"))
    expected = sample(with_lora, conditioning("all"))
    out, told, blocks = run(with_lora)
    assert same(out, expected)
    assert fused(told, "norm_modulate_int8") == fused(told, "swiglu_int8") == 0
    assert fused(told, "gate_norm_modulate_int8") == fused(told, "quantize_rotate_int8") == blocks
    (reason,) = stock(told, "quantised input (TensorWiseINT8Layout)")
    assert "LoRA" in reason


def test_a_dense_weight_is_an_error_with_the_way_out(model, monkeypatch):
    """ComfyUI's cast hands back a dense weight although the layer said it would not: no silent change of numerics."""
    from h3_vortex.kernels.patch.comfyui import accelerate
    from h3_vortex.kernels.patch.core import probe

    patched = accelerate(model, EAGER)
    sample(patched, conditioning("all"), steps=1)
    cast = probe().ops.cast_bias_weight

    def dense(linear, *args, **kwargs):
        weight, bias, stream = cast(linear, *args, **kwargs)
        return (weight.dequantize() if hasattr(weight, "_params") else weight), bias, stream

    monkeypatch.setattr("comfy.ops.cast_bias_weight", dense)
    with pytest.raises(RuntimeError, match="switch int8 off in H3 Accelerate"):
        sample(patched, conditioning("all"), steps=1)

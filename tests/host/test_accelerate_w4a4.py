"""NVFP4 as Blackwell runs it (both operands quantised), on the CPU through a reference GEMM that lives in these tests."""

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host import lora, w4a4
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock

EAGER = Features(allow_eager=True)
QUANTISED = {"norm_modulate_nvfp4": 1, "gate_norm_modulate_nvfp4": 1, "nvfp4_quantize": 1, "swiglu_nvfp4": 1}


@pytest.fixture(scope="module", params=["nvfp4", "pruned_nvfp4"])
def model(request, comfy, tiny_models):
    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("the reference GEMM is for the CPU: set H3_HOST_DEVICE=cpu")
    w4a4.register()
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models[request.param]))
    yield patcher
    comfy.model_management.unload_all_models()


def accelerated(patcher, features=EAGER):
    from h3_vortex.kernels.patch.comfyui import accelerate

    return accelerate(patcher, features)


def report(patcher):
    from h3_vortex.kernels.patch import comfyui

    return comfyui.report(patcher)


def blocks(patcher):
    return 4 * len(patcher.model.diffusion_model.blocks)


@pytest.mark.parametrize("kinds", ["text", "all"])
def test_quantised_inputs_give_stock_bytes(model, kinds):
    positive = conditioning(kinds)
    weight_only = sample(model, positive)
    with w4a4.native(model.model.diffusion_model) as layers:
        assert layers == 4 * len(model.model.diffusion_model.blocks)
        expected = sample(model, positive)
        assert not same(expected, weight_only), "activations were not quantised"
        patched = accelerated(model)
        assert same(sample(patched, positive), expected)
    told = report(patched)
    for op in QUANTISED:
        assert fused(told, op) == blocks(model), told["ops"]
    for plain in ("norm_modulate", "gate_norm_modulate", "swiglu"):
        assert fused(told, plain) == 0


def test_stock_does_not_quantise_behind_our_back(model, monkeypatch):
    """With every Linear fed by an op of ours, stock's own activation quantiser and stock's block may not be reached."""
    from comfy.quant_ops import QuantizedTensor

    with w4a4.native(model.model.diffusion_model):
        expected = sample(model, conditioning("all"))
        patched = accelerated(model)
        sample(patched, conditioning("all"), steps=1)  # verification, which does run stock, is over

        def forbidden(*args, **kwargs):
            raise AssertionError("stock ran")

        bypassed = {m for block in model.model.diffusion_model.blocks for m in (block, block.attn, block.mlp, block.norm1, block.norm2)}
        call = torch.nn.Module.__call__

        def watched(module, *args, **kwargs):
            return forbidden() if module in bypassed else call(module, *args, **kwargs)

        monkeypatch.setattr(QuantizedTensor, "from_float", forbidden)
        monkeypatch.setattr(torch.nn.Module, "__call__", watched)
        for name in ("_mod_scale_shift", "_mod_gate"):
            monkeypatch.setattr(f"comfy.ldm.minimax.model.{name}", forbidden)
        assert same(sample(patched, conditioning("all")), expected)


def test_calibrated_input_scale(model):
    """A static activation scale is used as the layer gives it, and differs from the dynamic one."""
    diffusion = model.model.diffusion_model
    layers = [m for m in diffusion.modules() if getattr(m, "quant_format", None) == "nvfp4"]
    with w4a4.native(diffusion):
        dynamic = sample(model, conditioning("all"))
        for layer in layers:
            layer.register_parameter("input_scale", torch.nn.Parameter(torch.tensor(0.004), requires_grad=False))
        try:
            expected = sample(model, conditioning("all"))
            assert not same(expected, dynamic)
            patched = accelerated(model)
            assert same(sample(patched, conditioning("all")), expected)
            told = report(patched)
            assert all(fused(told, op) == blocks(model) for op in QUANTISED)
        finally:
            for layer in layers:
                del layer.input_scale


def test_baked_lora_keeps_the_fast_path(model):
    with_lora = lora.add(model)
    with w4a4.native(model.model.diffusion_model):
        expected = sample(with_lora, conditioning("all"))
        assert not same(expected, sample(model, conditioning("all")))
        patched = accelerated(with_lora)
        assert same(sample(patched, conditioning("all")), expected)
    assert all(fused(report(patched), op) == blocks(model) for op in QUANTISED)


def test_lora_in_each_call_takes_the_stock_linear(model, monkeypatch):
    """A LoRA on two of the four layers: those get plain activations, the other two stay quantised."""
    with w4a4.native(model.model.diffusion_model):
        without = sample(model, conditioning("all"))
        lora.keep_weights_out(monkeypatch)
        with_lora = lora.add(model, ("attn.qkv_proj", "mlp.fc2"))
        expected = sample(with_lora, conditioning("all"))
        assert not same(expected, without)
        patched = accelerated(with_lora)
        assert same(sample(patched, conditioning("all")), expected)
    told = report(patched)
    (reason,) = stock(told, "quantised input (TensorCoreNVFP4Layout)")
    assert "LoRA" in reason
    assert fused(told, "norm_modulate") == blocks(model) and fused(told, "norm_modulate_nvfp4") == 0
    assert fused(told, "swiglu") == blocks(model) and fused(told, "swiglu_nvfp4") == 0
    assert fused(told, "gate_norm_modulate_nvfp4") == fused(told, "nvfp4_quantize") == blocks(model)


@pytest.mark.parametrize("state", ["full precision", "pre_quant_scale", "force cast"])
def test_state_of_one_layer_in_the_middle_of_a_run(model, state):
    """ComfyUI changes a layer between two calls: the next call of that layer, and of no other, is stock."""
    from h3_vortex.kernels.patch import comfyui

    diffusion = model.model.diffusion_model
    layer = diffusion.blocks[0].mlp.fc1
    with w4a4.native(diffusion):
        def change(step):
            if step != 1:
                return
            if state == "full precision":
                layer._full_precision_mm = True
            elif state == "pre_quant_scale":
                layer.pre_quant_scale = torch.full((layer.weight.shape[1],), 0.5)
            else:
                layer.comfy_force_cast_weights = True

        def restore():
            layer._full_precision_mm = False
            layer.comfy_force_cast_weights = False
            if hasattr(layer, "pre_quant_scale"):
                del layer.pre_quant_scale

        def run(patcher):
            calls = iter(range(100))
            handle = diffusion.final_layer.register_forward_hook(lambda *_: change(next(calls)))
            try:
                return sample(patcher, conditioning())
            finally:
                handle.remove()
                restore()

        expected = run(model)
        patched = accelerated(model)
        assert same(run(patched), expected)
    told = comfyui.report(patched)
    assert fused(told, "gate_norm_modulate_nvfp4") == blocks(model) - 2 and fused(told, "gate_norm_modulate") == 2
    assert sum(stock(told, "quantised input (TensorCoreNVFP4Layout)").values()) == 2


def test_a_wrong_op_is_caught_before_use(model, monkeypatch, caplog):
    """An op whose bytes differ never reaches the model: it is switched off for the process, said once, and the latents stay stock's."""
    from h3_vortex.kernels.patch import ops, verification

    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())
    monkeypatch.setattr(verification.cache, "read_json", lambda *_: None)
    monkeypatch.setattr(verification.cache, "write_json", lambda *_: True)
    function, op = ops._load("swiglu_nvfp4")

    def wrong(gate_up, tensor_scale=None, contract=None):
        q, scale, block_scale = function(gate_up, tensor_scale, contract)
        q[-1, -1] ^= 1
        return q, scale, block_scale

    load = ops._load
    monkeypatch.setattr(ops, "_load", lambda name: (wrong, op) if name == "swiglu_nvfp4" else load(name))
    with w4a4.native(model.model.diffusion_model):
        expected = sample(model, conditioning())
        patched = accelerated(model)
        assert same(sample(patched, conditioning()), expected)
    told = report(patched)
    assert fused(told, "swiglu_nvfp4") == 0
    assert all("bytes not those of stock" in reason for reason in stock(told, "swiglu_nvfp4"))
    assert len([r for r in caplog.records if "swiglu_nvfp4" in r.message and "switched off" in r.message]) == 1
    assert fused(told, "gate_norm_modulate_nvfp4") == blocks(model)

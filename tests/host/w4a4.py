"""NVFP4 x NVFP4 without FP4 tensor cores, for tests only: a reference ``scaled_mm_nvfp4`` for kitchen's registry, and layers set to it."""

import contextlib
import types

import torch

BACKEND = "h3_test_w4a4"


def scaled_mm_nvfp4(a, b, tensor_scale_a, tensor_scale_b, block_scale_a, block_scale_b, bias=None, out_dtype=None, alpha=None):
    """Dequantise both operands and multiply: what the tensor cores compute, in another order (on a GPU with operands rounded to bf16)."""
    import comfy_kitchen

    dtype = torch.float32 if a.device.type == "cpu" else torch.bfloat16
    left = comfy_kitchen.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, dtype)
    right = comfy_kitchen.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, dtype)
    return torch.nn.functional.linear(left, right, None if bias is None else bias.to(dtype)).to(out_dtype)


def register(device="cpu"):
    """Add the reference to kitchen's registry, in front of its own eager backend (which refuses the CPU). It stays there."""
    import comfy_kitchen
    from comfy_kitchen.constraints import FunctionConstraints

    module = types.ModuleType(BACKEND)
    module.scaled_mm_nvfp4 = scaled_mm_nvfp4
    limits = FunctionConstraints(default_devices=frozenset({device}))
    comfy_kitchen.registry.register(BACKEND, module, {"scaled_mm_nvfp4": limits})
    comfy_kitchen.registry.set_priority(["cuda", "triton", BACKEND, "eager"])


@contextlib.contextmanager
def native(diffusion_model):
    """NVFP4 layers compute W4A4 inside, as they would on Blackwell; yields how many there are."""
    layers = [m for m in diffusion_model.modules() if getattr(m, "quant_format", None) == "nvfp4" and m._full_precision_mm]
    for layer in layers:
        layer._full_precision_mm = False
    try:
        yield len(layers)
    finally:
        for layer in layers:
            layer._full_precision_mm = True

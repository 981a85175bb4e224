"""INT8-ConvRot as its CUDA kernels compute it, on the CPU: the pack's references in kitchen's place. For tests only.

Shows the runner's course (which pair goes to which weight, in which order, under which conditions), not the kernels' bytes: on a CPU
kitchen rotates by a matrix product, which gives other bytes, so there the pack leaves INT8 layers alone.
"""

import types

import torch

BACKEND = "h3_test_int8"


def gemm(pair, weight, weight_scale, out_dtype):
    """``(float(exact int32 product) * x_scale) * w_scale``, as kitchen's epilogue rounds it."""
    product = (pair[0].double() @ weight.double().t()).float()
    return ((product * pair[1]) * weight_scale.reshape(1, -1)).to(out_dtype)


def int8_linear(x, weight, weight_scale, bias=None, out_dtype=None, convrot=False, convrot_groupsize=256, input_act=None):
    from h3_vortex.kernels import quantize_rotate_int8, swiglu_int8

    assert convrot and convrot_groupsize == 256 and bias is None
    quantise = swiglu_int8.reference if input_act == "swiglu" else quantize_rotate_int8.reference
    return gemm(quantise(x.contiguous()), weight, weight_scale, out_dtype)


def install(monkeypatch):
    """Stock's ``int8_linear`` and the pack's seam both end in :func:`gemm`; CPU tensors count as tensors kitchen's kernels take."""
    import comfy_kitchen
    from comfy_kitchen.constraints import FunctionConstraints
    from h3_vortex.kernels.patch import eligibility, ops

    module = types.ModuleType(BACKEND)
    module.int8_linear = int8_linear
    limits = FunctionConstraints(default_devices=frozenset({"cpu"}))
    comfy_kitchen.registry.register(BACKEND, module, {"int8_linear": limits})
    comfy_kitchen.registry.set_priority(["cuda", "triton", BACKEND, "h3_test_w4a4", "eager"])
    monkeypatch.setattr(ops, "int8_gemm", gemm)
    monkeypatch.setattr(ops, "int8_gemm_problem", lambda x, columns: None)
    problem = eligibility._int8_problem
    monkeypatch.setattr(eligibility, "_int8_problem", lambda linear, x: problem(linear, _as_cuda(x)))


def uninstall():
    import comfy_kitchen

    comfy_kitchen.registry.set_priority(["cuda", "triton", "h3_test_w4a4", "eager"])


def _as_cuda(x):
    return types.SimpleNamespace(shape=x.shape, dtype=x.dtype, device=torch.device("cuda"))

"""NVFP4 projections through a fixed cuBLASLt schedule, where one was found that gives stock's bytes and beats it on this GPU.

The search (:mod:`..gemm_schedule`) happens at the first call of a shape, on that layer's own tensors, outside any recorded allocation
scope; until it has an answer, and wherever it found none, ComfyUI's own call runs. BF16 and FP8 projections are not searched: on an H200
stock was within 2.2 % of the best schedule at every shape (``benchmarks/results/gemm-h200.json``).
"""

import torch

from .. import gemm_schedule
from . import eligibility

STEM = "gemm_schedule"
SCHEDULES = gemm_schedule.Schedules()
OUTPUTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def linear(core, calls, layer, h) -> torch.Tensor | None:
    """``layer(h)`` of a quantised ``h`` through an accepted schedule; None, with the reason counted, when ``layer`` must be called.

    Args:
        core: :class:`.core.Core`. calls: :class:`.report.Calls`.
        layer: an NVFP4 Linear of ComfyUI that takes ``h`` as it is (see :func:`.eligibility.linear_input`).
        h: NVFP4 QuantizedTensor ``[S, K]``.
    """
    reason = gemm_schedule.unavailable_reason()
    if reason is None and torch.cuda.is_current_stream_capturing():
        reason = "not while a CUDA graph is captured"
    if reason is None and layer.bias is not None:
        reason = "the layer has a bias"
    if reason is not None:
        calls.stock[STEM, reason] += 1
        return None
    with core.nvfp4_weight(layer, h) as weight:
        if getattr(weight, "_layout_cls", None) != eligibility.NVFP4 or getattr(weight._params, "transposed", False):
            calls.stock[STEM, "the cast hands back a weight in another form"] += 1
            return torch.nn.functional.linear(h, weight)
        data = operands(h, weight)
        rows, (out_features, in_features) = h._qdata.shape[0], weight._params.orig_shape
        kind = OUTPUTS.get(h.dtype)
        if kind is None or weight._qdata.shape != (out_features, in_features // 2):
            calls.stock[STEM, f"no schedule for a padded weight or {h.dtype} output"] += 1
            return torch.nn.functional.linear(h, weight)
        problem = gemm_schedule.Problem("nvfp4", rows, out_features, in_features, kind)
        outcome = SCHEDULES.known("projection", problem, data.x.device)
        if outcome is None:
            with core.pause():
                outcome = SCHEDULES.prepare("projection", problem, [data, shuffled(data)], lambda d: _stock(core, d, h.dtype))
        if outcome.config is None:
            calls.stock[STEM, outcome.reason] += 1
            return torch.nn.functional.linear(h, weight)
        calls.fused[STEM, "cublaslt"] += 1
        return SCHEDULES.run("projection", problem, data, h.dtype)[: h.shape[0]]


def operands(h, weight) -> gemm_schedule.Operands:
    """What comfy-kitchen's NVFP4 layout hands to its GEMM for these two tensors."""
    alpha = (h._params.scale * weight._params.scale).to(torch.float32).reshape(1)
    return gemm_schedule.Operands(h._qdata, weight._qdata, h._params.block_scale, weight._params.block_scale, alpha)


def shuffled(data: gemm_schedule.Operands) -> gemm_schedule.Operands:
    """A second data set from the first: other products, the same ranges."""
    return gemm_schedule.Operands(data.x.flip(0), data.w, data.x_scale, data.w_scale, data.alpha)


def _stock(core, data, dtype):
    one = torch.ones((), dtype=torch.float32, device=data.x.device)
    return core.kitchen.scaled_mm_nvfp4(
        data.x, data.w, tensor_scale_a=one, tensor_scale_b=one, block_scale_a=data.x_scale, block_scale_b=data.w_scale,
        out_dtype=dtype, alpha=data.alpha)

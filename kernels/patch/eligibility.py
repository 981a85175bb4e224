"""Which form of input a Linear takes in this very call, and which modules may be bypassed. State is read per call: ComfyUI flips it
between calls (LoRA in three forms, temporary full precision, streaming).
"""

import re
from dataclasses import dataclass

import torch

NVFP4 = "TensorCoreNVFP4Layout"
INT8 = "TensorWiseINT8Layout"
CONVROT_GROUP = 256
INT8_MAX_K = 16384  # kitchen's fused quantiser; wider inputs take another route with other bytes


class SidePath:
    """Mark of what :mod:`.side_path` hangs on modules: the branches (forward hooks of Linears) and what stands in for ``MLP.forward``.

    The runner adds the branches itself, so to it such a module is stock.
    """

    previous = None  # the instance's own forward before


def side_paths(linear) -> list:
    """The branches beside ``linear``, in the order in which they are added."""
    return [hook for hook in linear._forward_hooks.values() if isinstance(hook, SidePath)]


@dataclass(frozen=True)
class Input:
    """What a Linear is fed: ``plain`` activations, or ones that an op of ours has already quantised.

    ``scale`` is the layer's calibrated activation scale (NVFP4), None for a dynamic one. ``reason`` says why a layer stored as
    ``layout`` gets plain input all the same; None when there is nothing to explain.
    """

    form: str = "plain"
    layout: str | None = None
    reason: str | None = None
    scale: torch.Tensor | None = None


def origin(function) -> str:
    """``module.name`` of a function, without the folder that a custom node's module name starts with."""
    module = re.split(r"[\\/]", getattr(function, "__module__", None) or "?")[-1]
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def foreign(module, home: str) -> str | None:
    """Why ``module`` must be called rather than reproduced: another pack owns its forward, or hooks hang on it. None when it is stock.

    Args:
        module: an ``nn.Module`` of the model.
        home: the core module that its class must come from.
    """
    stock = type(module).forward
    function = own_forward(module) or stock
    if function is not stock or stock.__module__ != home or hasattr(stock, "__wrapped__"):
        return f"{type(module).__name__}.forward is {origin(function)}"
    if module._forward_pre_hooks or len(module._forward_hooks) > len(side_paths(module)):
        return f"{type(module).__name__} has forward hooks"
    return None


def own_forward(module):
    """The function that an instance runs in place of its class's forward, or None."""
    own = vars(module).get("forward")  # an object patch; ComfyUI leaves the original bound here after undoing one
    if isinstance(own, SidePath):
        own = own.previous
    function = getattr(own, "__func__", own)
    return None if function is type(module).forward else function


def norm_problem(norm, x, ops_home: str) -> str | None:
    """Why an RMSNorm cannot be part of a fused op for ``x`` [S, H], or None."""
    problem = foreign(norm, ops_home)
    if problem:
        return problem
    if getattr(norm, "weight", None) is None or norm.weight.shape != x.shape[1:] or norm.eps is None:
        return "RMSNorm without a weight of the width, or without eps"
    casts = norm.comfy_cast_weights or norm.weight_function or norm.bias_function
    if not casts and norm.weight.dtype != x.dtype:
        return f"RMSNorm weight is {_dtype(norm.weight)}, activations are {_dtype(x)}"
    return None


def linear_input(linear, x, ops_home: str) -> Input:
    """The form in which ``linear`` may take its input instead of ``x`` [S, K] bf16/fp16/fp32, from its state now."""
    layout = getattr(linear, "layout_type", None)
    if layout not in (NVFP4, INT8):
        return Input()
    reason = foreign(linear, ops_home) or _quantised_path_off(linear, x)
    if reason is None:
        reason = _int8_problem(linear, x) if layout == INT8 else _nvfp4_problem(linear)
    if reason is not None:
        return Input(layout=layout, reason=reason)
    return Input("nvfp4" if layout == NVFP4 else "int8", layout)


def kind(block) -> str:
    """What decides the course of a block, in words: storage and per-call state of its layers."""
    parts = [f"{name}={_layer(layer)}" for name, layer in (
        ("qkv", block.attn.qkv_proj), ("out", block.attn.out_proj), ("fc1", block.mlp.fc1), ("fc2", block.mlp.fc2),
        ("norm", block.norm1), ("adaln", block.adaln_proj.linear))]
    return f"{' '.join(parts)} heads={block.attn.heads}x{block.attn.head_dim}"


def _layer(layer) -> str:
    state = [str(getattr(layer, "layout_type", None) or _dtype(layer.weight)), "x".join(str(n) for n in layer.weight.shape)]
    for name in ("_full_precision_mm", "comfy_force_cast_weights", "comfy_cast_weights", "weight_function", "bias_function",
                 "weight_lowvram_function", "pre_quant_scale", "input_scale"):
        value = getattr(layer, name, None)
        if value is not None and (isinstance(value, torch.Tensor) or value):
            state.append(name)
    if side_paths(layer):
        state.append("side_path")
    return "+".join(state)


def _quantised_path_off(linear, x) -> str | None:
    """The conditions under which ``Linear.forward`` quantises its input (or hands plain input to the INT8 GEMM)."""
    if linear._full_precision_mm:
        return "layer computes in full precision"
    if getattr(linear, "comfy_force_cast_weights", False):
        return "model compute dtype is forced"
    if linear.weight_function or linear.bias_function:
        return "a LoRA or weight wrapper acts on the weight in each call"
    if getattr(linear, "pre_quant_scale", None) is not None:
        return "layer scales its input first (pre_quant_scale)"
    if not hasattr(linear.weight, "_params"):
        return "weight is not stored quantised"
    if x.requires_grad:
        return "gradients are needed"
    return None


def _nvfp4_problem(linear) -> str | None:
    scale = getattr(linear, "input_scale", None)
    return f"input_scale holds {scale.numel()} values" if scale is not None and scale.numel() != 1 else None


def _int8_problem(linear, x) -> str | None:
    params = linear.weight._params
    if not getattr(params, "convrot", False) or getattr(params, "convrot_groupsize", 0) != CONVROT_GROUP:
        return f"not ConvRot with groups of {CONVROT_GROUP}"
    if getattr(params, "transposed", False):
        return "weight is transposed"
    if linear.bias is not None:
        return "layer has a bias"
    if x.device.type != "cuda":
        return "comfy-kitchen's INT8 kernels run on CUDA only"
    if linear.weight.dtype != x.dtype:
        return f"weight dequantises to {_dtype(linear.weight)}, activations are {_dtype(x)}"
    width = linear.weight.shape[1]
    if width % CONVROT_GROUP or width > INT8_MAX_K or x.shape[0] <= 2:
        return f"{x.shape[0]} rows of {width} take another route in comfy-kitchen"
    return None


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

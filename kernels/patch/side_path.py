"""LoRAs beside the layers of ComfyUI's H3: ``out = linear(x) + strength * alpha / rank * B(A(x))``, exact and undone exactly.

The base product keeps its bytes whatever the weight's format: nothing is merged or quantised again, and the branch sees the activation
that the layer was called with, before any scale that the layer applies to it. The branch is two products in the activation's dtype:
``A x``, rounded once, and a product that accumulates ``B`` of it onto the layer's output (in fp32 inside the product, rounded once).

How it hangs on the model: the clone of the ModelPatcher carries an injection (``comfy.patcher_extension.PatcherInjection``) that registers
a forward hook per layer when this very clone is loaded and removes it when another one is. The low-rank weights are a ModelPatcher of
their own among its additional models, so they are loaded, counted, streamed and evicted like any model. Core's multi-GPU nodes make a
clone with another model per GPU: it gets low-rank weights of its own, and its branches read those.

Core has a mechanism of that kind (``comfy.weight_adapter.bypass``). It does not serve here: ``linear_input_act`` runs an INT8 layer without
calling its module, so the second MLP layer would silently lose its LoRA; a second LoRA replaces the first; the weights stay on the device
outside the accounts. Hooks leave ``forward`` alone, so other packs' patches of it keep working, applied in any order.
"""

import contextlib
import importlib
import weakref

import torch

from .core import UnknownCore, signature_problem
from .eligibility import INT8, SidePath, own_forward, side_paths

KEY = "h3_vortex_turbo"
NEEDED = {
    "comfy.ops:cast_bias_weight": (
        ("s", "input", "dtype", "device", "bias_dtype", "offloadable", "compute_dtype", "want_requant"), ()),
    "comfy.ops:uncast_bias_weight": (("s", "weight", "bias", "offload_stream"), ()),
    "comfy.ops:linear_input_act": (("linear", "x", "input_act"), ("act_weight", "act_eps", "residual", "residual_scale")),
}


def attach(patcher, adapters: dict, strength: float):
    """A clone of ``patcher`` with ``adapters`` beside its layers, after those it has already.

    Args:
        patcher: ComfyUI ModelPatcher of an H3 model.
        adapters: ``{layer: Adapter}`` (:class:`....h3.turbo.Adapter`), layers as paths in the diffusion model.
        strength: factor on the branch; 0 attaches nothing, so that the model is the one that came in, byte for byte.

    Raises:
        UnknownCore: ComfyUI's weight casting takes other arguments than this version knows.
    """
    problems = [p for p in (signature_problem(path, *lists) for path, lists in NEEDED.items()) if p]
    if problems:
        raise UnknownCore(f"H3 Turbo LoRA: this ComfyUI is unknown to this version: {problems[0]}")
    clone = patcher.clone()
    if strength == 0:
        return clone
    holder = _holder(adapters, clone.load_device, clone.offload_device)
    clone.set_additional_models(KEY, [*clone.get_additional_models_with_key(KEY), holder])
    injection = _Injection(importlib.import_module("comfy.ops"), adapters, strength)
    kind = importlib.import_module("comfy.patcher_extension").PatcherInjection
    clone.set_injections(KEY, [*(clone.get_injections(KEY) or []), kind(inject=injection.inject, eject=injection.eject)])
    return clone


class TurboLoraWeights(torch.nn.Module):
    """Holds the low-rank weights of ``adapters``; ComfyUI's log names a model by its class."""

    def __init__(self, adapters):
        super().__init__()
        self.adapters = adapters


def _holder(adapters, load_device, offload_device, disable_dynamic=False):
    """A ModelPatcher of the low-rank weights; core makes further ones by the same call (``ModelPatcher.cached_patcher_init``)."""
    model_patcher = importlib.import_module("comfy.model_patcher")
    kind = model_patcher.ModelPatcher if disable_dynamic else model_patcher.CoreModelPatcher
    weights = _weights(importlib.import_module("comfy.ops"), adapters)
    holder = kind(weights, load_device=load_device, offload_device=offload_device)
    holder.cached_patcher_init = (_holder, (adapters, load_device, offload_device))
    return holder


def _weights(ops, adapters) -> torch.nn.Module:
    """The low-rank weights as ComfyUI Linears, which its patcher can move and stream: children named as the layers, dots replaced."""
    root = TurboLoraWeights(adapters)
    for layer, adapter in adapters.items():
        pair = torch.nn.Module()
        pair.down = _linear(ops, adapter.down, adapter.bias)
        pair.up = _linear(ops, adapter.up, None)
        root.add_module(layer.replace(".", "_"), pair)
    return root


def _linear(ops, weight, bias):
    linear = ops.manual_cast.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


class _Injection:
    """Hangs one LoRA on whatever model a patcher holds when it is loaded; knows what it hung where, so undoing is exact and repeatable.

    Clones share this object and copy the flag that says they are injected: only the patcher that injected last may undo, or the end of an
    unused clone would take the LoRA off the model that another one is sampling.
    """

    def __init__(self, ops, adapters, strength):
        self.ops, self.adapters, self.strength = ops, adapters, strength
        self._hung = weakref.WeakKeyDictionary()  # diffusion model -> ExitStack that undoes
        self._owner = weakref.WeakKeyDictionary()  # diffusion model -> id of the patcher that injected (weak references die before __del__)

    def inject(self, patcher):
        model = patcher.model.diffusion_model
        if model not in self._hung:
            holders = patcher.get_additional_models_with_key(KEY)
            weights = next(holder.model for holder in holders if holder.model.adapters is self.adapters)
            with contextlib.ExitStack() as hung:  # all of it, or none
                for layer, adapter in self.adapters.items():
                    linear = model.get_submodule(layer)
                    branch = Branch(self.ops, weights.get_submodule(layer.replace(".", "_")), adapter, self.strength)
                    if layer.endswith(".mlp.fc2") and getattr(linear, "layout_type", None) == INT8:
                        # undone in reverse: the layer's last branch must be gone by then
                        hung.callback(_take_over(self.ops, model.get_submodule(layer.removesuffix(".fc2"))))
                    hung.callback(linear.register_forward_hook(branch).remove)
                self._hung[model] = hung.pop_all()
        self._owner[model] = id(patcher)

    def eject(self, patcher):
        model = patcher.model.diffusion_model
        if self._owner.get(model) == id(patcher):
            if model in self._hung:
                self._hung.pop(model).close()


class Branch(SidePath):
    """The forward hook of one layer. Called by torch with ``(module, inputs, output)``; :meth:`add` is the arithmetic alone."""

    def __init__(self, ops, pair, adapter, strength):
        self.ops, self.pair = ops, pair
        self.width, self.spans = adapter.width, adapter.spans
        self.factors = tuple(scale * strength for scale in adapter.scales)
        self.rank = adapter.rank
        self.calls = 0

    def __call__(self, module, inputs, output):
        x = inputs[0]
        if type(x) is not torch.Tensor and hasattr(x, "dequantize") and hasattr(x, "_params"):
            raise RuntimeError(
                "H3 Turbo LoRA: a layer was given an input that another node had already quantised, so its LoRA cannot see the activation: "
                "remove that node, or set the LoRA's strength to 0")
        self.calls += 1
        return self.add(x, output)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out`` ``[..., out]`` plus the branch of ``x`` ``[..., in]``, accumulated in place into the fresh output of a layer.

        Where gradients are recorded a copy of ``out`` is written instead.
        """
        if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
            out = out.clone()
        rows, target = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        with self._weight(self.pair.down, rows) as (weight, bias):
            hidden = torch.nn.functional.linear(rows, weight, bias)
        with self._weight(self.pair.up, rows) as (weight, _):
            for index, ((start, stop), factor) in enumerate(zip(self.spans, self.factors, strict=True)):
                columns = hidden[:, index * self.width : (index + 1) * self.width]
                target[:, start:stop].addmm_(columns, weight[start:stop].t(), alpha=factor)
        return out

    @contextlib.contextmanager
    def _weight(self, linear, rows):
        """(weight, bias) cast and moved as ComfyUI does it for any layer."""
        weight, bias, stream = self.ops.cast_bias_weight(linear, rows, offloadable=True)
        try:
            yield weight, bias
        finally:
            self.ops.uncast_bias_weight(linear, weight, bias, stream)


# -- INT8: the second MLP layer ------------------------------------------------------------------------------------------------------------


def swiglu_linear(ops, linear, gate_up):
    """Core's ``linear_input_act(linear, gate_up, "swiglu")``, with the layer's branches where core ran the layer without calling it."""
    branches = side_paths(linear)
    before = [branch.calls for branch in branches]
    out = ops.linear_input_act(linear, gate_up, "swiglu")
    return _add_missed(ops, branches, before, out, lambda: gate_up)


def _add_missed(ops, branches, before, out, gate_up):
    missed = [branch for branch, calls in zip(branches, before, strict=True) if branch.calls == calls]
    if missed:
        h = ops.INPUT_ACT_EAGER["swiglu"](gate_up())
        for branch in missed:
            out = branch.add(h, out)
    return out


class SideMLP(SidePath):
    """In the place of ``MLP.forward`` where its second layer is INT8: core folds SwiGLU into the quantiser there and never calls the layer.

    ``previous`` is another pack's ``forward`` of this instance, which is called as it is; the gate and up values that its result does not
    show are then computed again. ``found`` is whatever the instance had, put back by undoing.
    """

    def __init__(self, ops, mlp, found):
        self.ops, self.mlp, self.found = ops, mlp, found
        self.previous = None if own_forward(mlp) is None else found

    def __call__(self, x):
        if self.previous is None:
            return swiglu_linear(self.ops, self.mlp.fc2, self.mlp.fc1(x))
        branches = side_paths(self.mlp.fc2)
        before = [branch.calls for branch in branches]
        out = self.previous(x)
        return _add_missed(self.ops, branches, before, out, lambda: self.mlp.fc1(x))


def _take_over(ops, mlp):
    """Put a :class:`SideMLP` on ``mlp`` unless there is one; returns what removes it with the layer's last branch."""
    own = vars(mlp).get("forward")
    taken = mlp.forward = own if isinstance(own, SideMLP) else SideMLP(ops, mlp, own)

    def undo():
        if side_paths(mlp.fc2) or vars(mlp).get("forward") is not taken:
            return
        if taken.found is None:
            del mlp.forward
        else:
            mlp.forward = taken.found

    return undo

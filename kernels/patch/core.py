"""ComfyUI's side of the patch: every core function the runner calls, and every difference between cores, in one place.

Read in cores 0.33.0 to 0.38.1. Features are detected from attributes and signatures, never from version numbers, with one
exception: comfy-aimdo below 0.5.3 loses tensors that were allocated while its graph was paused, which nothing but its version tells.

A core whose H3 classes take other arguments than those listed in :data:`SIGNATURES` is not patched at all: :func:`probe` raises
:class:`UnknownCore` with one readable line, and the model runs as if the pack were not there.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from .. import cache
from .verification import device_name

MODEL = "comfy.ldm.minimax.model"
BLOCK_ARGUMENTS = frozenset({"img", "t_emb", "mod_segments", "rope_freqs", "transformer_options", "attention", "layout"})

# what is called or replaced -> (arguments it must take, further arguments it may take)
SIGNATURES = {
    f"{MODEL}:DiTBlock.forward": (("self", "x", "t_emb", "mod_segments", "rope_freqs", "transformer_options"), ("attention",)),
    f"{MODEL}:Attention.forward": (("self", "x", "rope_freqs", "transformer_options"), ()),
    f"{MODEL}:MLP.forward": (("self", "x"), ()),
    f"{MODEL}:AdalnProj.forward": (("self", "t_emb"), ()),
    f"{MODEL}:_mod_scale_shift": (("h", "shift", "scale", "segments"), ()),
    f"{MODEL}:_mod_gate": (("x", "gate", "other", "segments"), ()),
    f"{MODEL}:AttentionTensorContainer.__init__": (("self", "tensor"), ()),
    "comfy.ops:linear_input_act": (("linear", "x", "input_act"), ("act_weight", "act_eps", "residual", "residual_scale")),
    "comfy.ops:cast_bias_weight": (
        ("s", "input", "dtype", "device", "bias_dtype", "offloadable", "compute_dtype", "want_requant"), ()),
    "comfy.ops:uncast_bias_weight": (("s", "weight", "bias", "offload_stream"), ()),
    "comfy.model_management:cast_to": (("weight", "dtype", "device"), ("non_blocking", "copy", "stream", "r")),
    "comfy.model_management:cast_to_device": (("tensor", "device", "dtype"), ("copy",)),
}
# attention functions whose bytes do not depend on v being a copy or a view of the qkv buffer (measured at full size on SM90;
# verified again at first use, see checks.attention_v)
VIEW_SAFE = frozenset({"attention_pytorch", "attention_comfy_kitchen_int8", "attention_sage", "attention_flash"})


class UnknownCore(RuntimeError):
    """This ComfyUI cannot be patched; the message says in one line what was expected and what is there."""


def resolve(path: str):
    """The object behind ``module:name.name``."""
    module, names = path.split(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def signature_problem(path: str, required: tuple[str, ...], allowed: tuple[str, ...]) -> str | None:
    """None when the core function takes what the runner gives it, else the difference in words."""
    name = path.split(":")[1]
    try:
        parameters = inspect.signature(resolve(path)).parameters
    except (ImportError, AttributeError):
        return f"{name} is missing"
    missing = [p for p in required if p not in parameters]
    named = [p for p, kind in parameters.items() if kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
    extra = [p for p in named if p not in required and p not in allowed]
    if missing or extra:
        return f"{name} takes ({', '.join(parameters)}), expected ({', '.join(required)})"
    return None


@functools.cache
def probe() -> "Core":
    """The running ComfyUI, checked. Raises :class:`UnknownCore`."""
    try:
        importlib.import_module(MODEL)
    except ImportError as error:
        raise UnknownCore("H3 Vortex: this ComfyUI has no MiniMax H3 model; version 0.33.0 or newer is needed") from error
    problems = [p for p in (signature_problem(path, *lists) for path, lists in SIGNATURES.items()) if p]
    if problems:
        raise UnknownCore(f"H3 Vortex: this ComfyUI's H3 model is unknown to this version, so it runs unpatched: {problems[0]}")
    return Core()


class Core:
    """Handles to the running ComfyUI. Made by :func:`probe`; tests replace single attributes."""

    def __init__(self):
        self.model = importlib.import_module(MODEL)
        self.ops = importlib.import_module("comfy.ops")
        self.management = importlib.import_module("comfy.model_management")
        self.prefetch = importlib.import_module("comfy.model_prefetch")
        self.quant = importlib.import_module("comfy.quant_ops")
        self.attention_module = importlib.import_module("comfy.ldm.modules.attention")
        self.arguments = importlib.import_module("comfy.cli_args").args
        self.wrappers = importlib.import_module("comfy.patcher_extension").WrappersMP
        self.kitchen = self.quant.ck
        self.QuantizedTensor = self.quant.QuantizedTensor
        body = inspect.getsource(self.model.Attention.forward)
        self.clones_v = ".clone()" in body
        self.prefers_attention = "preferred_attention" in body
        self.compiler = compiler_state(self.arguments, self.prefetch)

    @staticmethod
    def version() -> str:
        """ComfyUI's version as it states it, for the report only."""
        if importlib.util.find_spec("comfyui_version") is None:
            return "unknown"
        return getattr(importlib.import_module("comfyui_version"), "__version__", "unknown")

    # -- what runs where -----------------------------------------------------------------------------------------------------

    @property
    def in_training(self) -> bool:
        return bool(getattr(self.management, "in_training", False))

    def is_h3(self, model) -> bool:
        return isinstance(model, self.model.MiniMaxH3Model)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the core sources the runner mirrors: part of the key under which verdicts are remembered."""
        files = (self.model, self.ops, self.attention_module, self.quant)
        return cache.digest(*(Path(module.__file__).read_bytes() for module in files))

    # -- the compiler's allocation graph (cores from 0.34) -----------------------------------------------------------------------

    @contextlib.contextmanager
    def pause(self):
        """Context in which allocations are not recorded by the compiler's allocation graph; nothing to do on cores without one.

        The core's own pause is a flag (leaving an inner one resumes the recording), so only the outermost of this thread enters it.
        """
        depth = getattr(_paused, "depth", 0)
        _paused.depth = depth + 1
        try:
            if depth:
                yield
            else:
                with self.compiler.pause():
                    yield
        finally:
            _paused.depth = depth

    # -- weights ---------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def norm_weight(self, norm, x: torch.Tensor):
        """The weight that ``norm(x)`` would use, cast, patched and moved as ComfyUI does it."""
        if not (norm.comfy_cast_weights or norm.weight_function or norm.bias_function):
            yield norm.weight
            return
        weight, bias, stream = self.ops.cast_bias_weight(norm, x, offloadable=True)
        try:
            yield weight
        finally:
            self.ops.uncast_bias_weight(norm, weight, bias, stream)

    @contextlib.contextmanager
    def int8_weight(self, linear, x: torch.Tensor):
        """``(qdata, scale)`` of an INT8 Linear as its own forward takes them from the cast."""
        weight, bias, stream = self.ops.cast_bias_weight(
            linear, None, dtype=linear.weight.dtype, device=x.device, bias_dtype=x.dtype, offloadable=True, compute_dtype=x.dtype,
            want_requant=True)
        try:
            if not isinstance(weight, self.QuantizedTensor):
                raise RuntimeError(
                    "H3 Vortex: ComfyUI's cast returned a dense weight for an INT8 layer that was quantised a moment ago; "
                    "switch int8 off in H3 Accelerate (mode advanced) and report this")
            yield self.quant.TensorWiseINT8Layout.get_plain_tensors(weight)
        finally:
            self.ops.uncast_bias_weight(linear, weight, bias, stream)

    @contextlib.contextmanager
    def nvfp4_weight(self, linear, h):
        """The weight that ``linear(h)`` multiplies a quantised ``h`` with, from the same cast."""
        weight, bias, stream = self.ops.cast_bias_weight(linear, h, offloadable=True, compute_dtype=h.dtype, want_requant=True)
        try:
            yield weight
        finally:
            self.ops.uncast_bias_weight(linear, weight, bias, stream)

    def input_scale(self, linear, x: torch.Tensor) -> torch.Tensor | None:
        """The layer's calibrated activation scale as fp32 where ``linear(x)`` would read it, or None (dynamic scale)."""
        scale = getattr(linear, "input_scale", None)
        return None if scale is None else self.management.cast_to_device(scale, x.device, torch.float32)

    def head_weights(self, attn, device) -> tuple[torch.Tensor, torch.Tensor]:
        """``q_norm`` and ``k_norm`` weights as ``Attention.forward`` casts them."""
        return (self.management.cast_to(attn.q_norm.weight, device=device), self.management.cast_to(attn.k_norm.weight, device=device))

    # -- attention ---------------------------------------------------------------------------------------------------------------

    def attend(self, attn, qkv: list[torch.Tensor], options) -> torch.Tensor:
        """``optimized_attention`` on three ``[S, heads, D]`` tensors (any number of heads), called as ``Attention.forward`` calls it.

        ``qkv`` is emptied: whoever takes the tensors out of their boxes is then their only owner and can free them early.

        Returns:
            ``[S, heads * D]``.
        """
        keywords = {"mask": None, "skip_reshape": True, "transformer_options": options}
        if self.prefers_attention and hasattr(attn, "comfy_attention"):
            keywords["preferred_attention"] = attn.comfy_attention
        heads = qkv[0].shape[1]
        boxes = [self.model.AttentionTensorContainer(qkv.pop(0).transpose(0, 1).unsqueeze(0)) for _ in range(3)]
        return self.model.optimized_attention(*boxes, heads, **keywords).squeeze(0)

    def attention_function(self, attn, options) -> tuple[str, str]:
        """(name, origin) of the function that :meth:`attend` ends in; origin is ``override``, ``checkpoint`` or ``core``."""
        override = options.get("optimized_attention_override")
        if override is not None:
            inner = inspect.getclosurevars(override).nonlocals.get("optimized_attention") if inspect.isfunction(override) else None
            return function_name(inner or override), "override"
        preferred = getattr(getattr(attn, "comfy_attention", None), "function", None) if self.prefers_attention else None
        if preferred is not None:
            return function_name(preferred), "checkpoint"
        return function_name(self.model.optimized_attention), "core"


def attention_kernels(name: str, ops) -> str:
    """An attention function by name; torch's also depends on which of its kernels ComfyUI put first."""
    order = getattr(ops, "SDPA_BACKEND_PRIORITY", []) if name == "attention_pytorch" else []
    return f"{name} {','.join(getattr(kernel, 'name', str(kernel)) for kernel in order)}"


def view_case(name: str, ops, attn, v: torch.Tensor) -> str:
    """What a verdict on a view of v holds for."""
    return f"v as a view: {attention_kernels(name, ops)} {device_name(v.device)} {v.dtype} heads:{attn.heads}x{attn.head_dim}"


def function_name(function) -> str:
    """A callable's name without the folder a custom node was loaded from."""
    return getattr(function, "__name__", type(function).__name__)


# -- the compiler's allocation graph ------------------------------------------------------------------------------------------------

_paused = threading.local()
_opt_out = SimpleNamespace(lock=threading.Lock(), depth=0, saved=False)


def compiler_state(arguments, prefetch) -> SimpleNamespace:
    """``pause`` (a context factory) and ``opt_out`` (None, or why each call must run without the compiler)."""
    if not hasattr(arguments, "disable_comfy_compiler"):
        return SimpleNamespace(pause=contextlib.nullcontext, opt_out=None)
    pause = getattr(prefetch, "pause_malloc_graph", None)
    if pause is None:
        return SimpleNamespace(pause=contextlib.nullcontext, opt_out="this core's compiler cannot be paused")
    version = aimdo_version()
    if version is not None and version < (0, 5, 3):
        text = ".".join(map(str, version))
        return SimpleNamespace(pause=contextlib.nullcontext, opt_out=f"comfy-aimdo {text} cannot free what was allocated in a pause")
    return SimpleNamespace(pause=pause, opt_out=None)


def aimdo_version() -> tuple[int, ...] | None:
    """Installed comfy-aimdo as a tuple, None when it is not an installed distribution."""
    try:
        text = importlib.metadata.version("comfy-aimdo")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:3])


@contextlib.contextmanager
def compiler_off(arguments):
    """Run one model call without the compiler: its switch is process-wide, so it is counted, held for the call and put back."""
    with _opt_out.lock:
        if _opt_out.depth == 0:
            _opt_out.saved = arguments.disable_comfy_compiler
            arguments.disable_comfy_compiler = True
        _opt_out.depth += 1
    try:
        yield
    finally:
        with _opt_out.lock:
            _opt_out.depth -= 1
            if _opt_out.depth == 0:
                arguments.disable_comfy_compiler = _opt_out.saved

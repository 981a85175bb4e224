"""H3 Vortex in diffusers: :func:`accelerate` makes the H3 blocks of one ``MiniMaxH3Transformer3DModel`` run this pack's ops.

Only that instance is touched: each block gets a ``forward`` of its own, in the innermost place, so that hooks of diffusers (context
parallelism, group offloading, caches) and of accelerate (CPU offload), set before or after, keep wrapping it; two hooks on the transformer
mark where a model call starts and ends. Undoing takes these out again, in any order with whatever else was added; a block whose
``forward`` somebody else still holds then runs stock.

diffusers' blocks round in other places than ComfyUI's, so the ops run in their variants: ``gate`` with ``rounding="twice"``,
``qk_norm_rope`` with ``norm="torch"``, ``swiglu`` with ``order="value_gate"``. Same rules as in ComfyUI: verified before first use,
counted, stock otherwise.
"""

import functools
import importlib
import importlib.metadata
import threading
import types
import weakref
from collections import Counter
from pathlib import Path

import torch

from .. import attention as attentions
from .. import cache
from .core import signature_problem
from .diffusers_call import MODEL, BlockCall, kind
from .ops import Features
from .report import Session, timed_run

__all__ = ["Accelerated", "Features", "accelerate"]

SIGNATURES = {
    f"{MODEL}:MiniMaxH3TransformerBlock.forward": (("self", "hidden_states", "temb", "adaln_indices", "rotary_emb", "attention_mask"), ()),
    f"{MODEL}:MiniMaxH3Attention.forward": (("self", "hidden_states", "rotary_emb", "attention_mask"), ()),
    f"{MODEL}:MiniMaxH3AttnProcessor.__call__": (("self", "attn", "hidden_states", "rotary_emb", "attention_mask"), ()),
    f"{MODEL}:MiniMaxH3AdaLayerNormModulation.forward": (("self", "temb"), ()),
    f"{MODEL}:_apply_rotary_emb": (("hidden_states", "cos", "sin"), ()),
    f"{MODEL}:dispatch_attention_fn": (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "backend", "parallel_config"),
        ("scale", "enable_gqa", "attention_kwargs")),
}

_lock = threading.RLock()
_installed: "weakref.WeakKeyDictionary[torch.nn.Module, _Installed]" = weakref.WeakKeyDictionary()  # transformer -> what it has
_owner: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref]" = weakref.WeakKeyDictionary()  # block -> its transformer's _Installed


def accelerate(transformer, features: Features | None = None, attention: str = attentions.STOCK, mode: str = "exact") -> "Accelerated":
    """Make ``transformer`` run this pack's ops: with diffusers' own attention, the same bytes as before.

    Args:
        transformer: diffusers ``MiniMaxH3Transformer3DModel``, loaded in any way, with or without LoRAs, hooks and offloading.
        features: which fusions may run; default all of them (class E0).
        attention: one of :data:`..attention.CHOICES`. ``stock (exact)`` keeps what diffusers has selected.
        mode: a word for the report.

    Returns:
        A handle: a context manager that undoes on exit, with ``undo()``, ``report()`` and ``run()``. Where the blocks cannot be replaced
        (an unknown diffusers, a ``torch.compile``d transformer) the model runs unpatched and the report says why. With several handles on
        one transformer the newest one decides.

    Raises:
        ValueError: unknown ``attention``; ``transformer`` is another model.
        AttentionUnavailable: an attention backend by name that cannot run here, or beside context parallelism.
    """
    attentions.plan(attention)
    session = Session(mode, attention)
    session.core = f"diffusers {importlib.metadata.version('diffusers')}"
    problem = _compiled(transformer) or _unknown_diffusers()
    handle = Accelerated(transformer, session, features or Features())
    if problem is not None:
        if attention not in (attentions.STOCK, attentions.FASTEST):
            raise attentions.AttentionUnavailable(f"H3 attention: {attention} was asked for, but: {problem}")
        session.step_aside(f"H3 Vortex: {problem}; it runs unpatched")
        return handle
    if not isinstance(transformer, importlib.import_module(MODEL).MiniMaxH3Transformer3DModel):
        raise ValueError(f"H3 Vortex accelerates MiniMaxH3Transformer3DModel, got a {type(transformer).__name__}")
    if attention not in (attentions.STOCK, attentions.FASTEST):
        device = next(transformer.parameters()).device
        attentions.plan(attention, env=attentions.Environment.of(device))
        if getattr(transformer, "_parallel_config", None) is not None:
            raise attentions.AttentionUnavailable(
                f"H3 attention: {attention} was asked for, but the transformer runs diffusers' context parallelism, which has its own "
                f"attention. Choose {attentions.STOCK!r}")
    with _lock:
        installed = _installed.get(transformer)
        if installed is None:
            installed = _installed[transformer] = _Installed(transformer)
        installed.handles.append(handle)
    return handle


class Accelerated:
    """What :func:`accelerate` returns."""

    def __init__(self, transformer, session: Session, features: Features):
        self._transformer = weakref.ref(transformer)
        self.session, self.features = session, features

    def undo(self) -> None:
        """Take this acceleration away; with the last one the transformer is as it was. Doing it again does nothing."""
        transformer = self._transformer()
        if transformer is None:
            return
        with _lock:
            installed = _installed.get(transformer)
            if installed is None or self not in installed.handles:
                return
            installed.handles.remove(self)
            if not installed.handles:
                installed.remove(transformer)
                del _installed[transformer]

    def run(self):
        """A context for one sampling run: counts and the attention choice start anew, one line is logged at its end."""
        return timed_run(self.session)

    def report(self) -> dict:
        """What ran so far, JSON-ready; the keys are those of :func:`.comfyui.report`."""
        return self.session.report()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.undo()
        return False


class _Installed:
    """The replaced forwards and the two hooks of one transformer, and the calls in flight. Does not hold the transformer."""

    def __init__(self, transformer):
        self.handles: list[Accelerated] = []
        self.digest = host_digest()
        self._calls = threading.local()
        self.hooks = (
            transformer.register_forward_pre_hook(self._begin),
            transformer.register_forward_hook(self._end, always_call=True),
        )
        self.unreachable = [index for index, block in enumerate(transformer.transformer_blocks) if not _replace(block)]
        for block in transformer.transformer_blocks:
            _owner[block] = weakref.ref(self)

    def __deepcopy__(self, memo):
        return self  # a copied transformer brings our hooks along; they see that it is not the one they belong to

    def remove(self, transformer) -> None:
        for hook in self.hooks:
            hook.remove()
        for block in transformer.transformer_blocks:
            _owner.pop(block, None)
            _restore(block)

    @property
    def call(self) -> BlockCall | None:
        """This thread's model call, None outside of one (a block called by itself)."""
        return getattr(self._calls, "call", None)

    def _begin(self, transformer, args):
        if torch.compiler.is_compiling() or _installed.get(transformer) is not self:
            return
        handle = self.handles[-1]
        session = handle.session
        call = BlockCall(session, handle.features, self.digest, transformer)
        if self.unreachable:
            call.calls.stock["block", "somebody else replaced its forward"] += len(self.unreachable)
        self._calls.call = call
        session.stepped_aside = None
        session.layers = dict(Counter(kind(block) for block in transformer.transformer_blocks))

    def _end(self, transformer, args, output):
        if torch.compiler.is_compiling():
            return
        call, self._calls.call = self.call, None
        if call is not None:
            call.session.finish_call(call.calls, call.rows_seen)


def _accelerated_forward(block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask=None):
    """``MiniMaxH3TransformerBlock.forward`` with this pack's ops where they may run."""
    stock = type(block).forward
    if torch.compiler.is_compiling():  # the compiled graph is stock's
        return stock(block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask)
    installed = _owner.get(block, lambda: None)()
    call = installed.call if installed is not None else None
    if call is None:
        return stock(block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask)
    return call.block(block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask)


# -- where a block's forward lives ---------------------------------------------------------------------------------------------------


def _slots(block):
    """``(holder, name)`` of every place that can hold the innermost forward of ``block``: an object and its attribute.

    diffusers' hooks keep what they wrap in the references of ``block._diffusers_hook``, accelerate's in ``block._old_forward``.
    """
    for reference in getattr(getattr(block, "_diffusers_hook", None), "_fn_refs", ()):
        yield reference, "original_forward"
        yield reference, "forward"
    yield block, "_old_forward"
    yield block, "forward"


def _held(block, function) -> list:
    """The slots in which a bound ``function`` of this very block lies."""
    found = []
    for holder, name in _slots(block):
        value = vars(holder).get(name)
        if getattr(value, "__func__", None) is function and value.__self__ is block:
            found.append((holder, name))
    return found


def _replace(block) -> bool:
    """Put our forward where the stock one is called from. False when somebody else's function is there."""
    ours = types.MethodType(_accelerated_forward, block)
    if "forward" not in vars(block):
        block.forward = ours
        return True
    places = _held(block, type(block).forward)
    for holder, name in places:
        setattr(holder, name, ours)
    return bool(places)


def _restore(block) -> None:
    """Undo :func:`_replace`, wherever our forward has moved to since."""
    for holder, name in _held(block, _accelerated_forward):
        if holder is block and name == "forward":
            del block.forward
        else:
            setattr(holder, name, types.MethodType(type(block).forward, block))


def _unknown_diffusers() -> str | None:
    problems = [problem for path, lists in SIGNATURES.items() if (problem := signature_problem(path, *lists))]
    return f"this diffusers' H3 is unknown to this version: {problems[0]}" if problems else None


def _compiled(transformer) -> str | None:
    if hasattr(transformer, "_orig_mod"):
        return "the transformer was compiled by torch.compile; pass the module inside it, before compiling, to have both"
    modules = [transformer, *getattr(transformer, "transformer_blocks", ())]
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in modules):
        return "the transformer or its blocks were compiled by Module.compile"
    return None


@functools.cache
def host_digest() -> str:
    """Hash of the diffusers sources that the runner mirrors: part of the key under which verdicts are remembered."""
    names = (MODEL, "diffusers.models.attention", "diffusers.models.activations", "diffusers.models.attention_dispatch")
    return cache.digest("diffusers", *(Path(importlib.import_module(name).__file__).read_bytes() for name in names))



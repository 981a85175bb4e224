"""Which implementation of an op runs, and why the others do not.

An :class:`Op` owns its reference (the numerical contract) and its backends. Each backend carries a :class:`Constraints` table;
:meth:`Op.reasons` prints the first failing rule per backend, so "why did this not run?" always has an answer.
An automatic choice takes the first eligible backend in ``ORDER`` and ends at ``eager``; an explicit one (:func:`use_backend`)
raises when that backend cannot run.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

ORDER = ("cuda", "triton", "eager")
_local = threading.local()


class BackendUnavailable(RuntimeError):
    """An explicitly requested backend cannot run this call; the message names the failing constraint."""


@dataclass(frozen=True)
class Rule:
    """``holds(arguments)`` must be true; ``text`` completes the sentence "needs ..."."""

    text: str
    holds: Callable[[Mapping[str, object]], bool]


@dataclass(frozen=True)
class Constraints:
    """What a backend needs. Tensors are looked up by argument name in ``tensors``; others are free."""

    devices: frozenset[str]
    dtypes: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    min_capability: tuple[int, int] | None = None
    available: Callable[[], str | None] = lambda: None
    rules: tuple[Rule, ...] = ()

    def reason(self, arguments: Mapping[str, object]) -> str | None:
        """None when the call may run here, else the failing constraint in words."""
        missing = self.available()
        if missing:
            return missing
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        for name, tensor in tensors.items():
            if tensor.device.type not in self.devices:
                return f"needs {' or '.join(sorted(self.devices))} tensors, {name} is on {tensor.device.type}"
        for name, allowed in self.dtypes.items():
            tensor = arguments[name]
            if tensor is not None and tensor.dtype not in allowed:
                names = " or ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
                return f"needs {name} in {names}, got {str(tensor.dtype).removeprefix('torch.')}"
        if self.min_capability is not None:
            device = next(iter(tensors.values())).device
            capability = torch.cuda.get_device_capability(device)
            if capability < self.min_capability:
                return f"needs compute capability {self.min_capability[0]}.{self.min_capability[1]}, got {capability[0]}.{capability[1]}"
        for rule in self.rules:
            if not rule.holds(arguments):
                return f"needs {rule.text}"
        return None


@dataclass
class Backend:
    run: Callable
    constraints: Constraints


class Op:
    """One op: its reference and its backends.

    Args:
        name: the stem shared by ``kernels/``, ``tests/`` and ``benchmarks/``.
        reference: eager torch; the numerical contract. Registered as backend ``eager`` and able to run anything.
        signature: names of the arguments, in call order.
        check: raises ValueError for arguments that fit no backend. Called once per distinct set of shapes, strides, dtypes and devices.
    """

    registry: dict[str, "Op"] = {}

    def __init__(self, name: str, reference: Callable, signature: tuple[str, ...], check: Callable | None = None):
        self.name = name
        self.check = check
        self.reference = reference
        self.signature = signature
        self.backends: dict[str, Backend] = {"eager": Backend(reference, Constraints(frozenset({"cpu", "cuda", "meta", "mps", "xpu"})))}
        self._choices: dict[tuple, str] = {}
        Op.registry[name] = self

    def add_backend(self, name: str, run: Callable, constraints: Constraints) -> None:
        if name not in ORDER:
            raise ValueError(f"{self.name}: backend {name!r} is not one of {', '.join(ORDER)}")
        self.backends[name] = Backend(run, constraints)

    def reasons(self, *args) -> dict[str, str | None]:
        """For each backend: None when it could run this call, else the failing constraint."""
        arguments = dict(zip(self.signature, args, strict=True))
        return {name: self.backends[name].constraints.reason(arguments) for name in ORDER if name in self.backends}

    def choose(self, *args) -> str:
        """The backend an automatic call takes, or the explicit one. Raises :class:`BackendUnavailable` for the latter."""
        wanted = getattr(_local, "backend", None)
        if wanted is not None and self.check is not None:
            self.check(*args)
        if wanted is not None and wanted in self.backends:
            reason = self.backends[wanted].constraints.reason(dict(zip(self.signature, args, strict=True)))
            if reason:
                raise BackendUnavailable(f"{self.name}: backend {wanted} {reason}")
            return wanted
        if wanted is not None:
            raise BackendUnavailable(f"{self.name}: there is no backend {wanted}; it has {', '.join(self.backends)}")
        key = tuple(_key(a) for a in args)
        choice = self._choices.get(key)
        if choice is None:
            if self.check is not None:
                self.check(*args)
            reasons = self.reasons(*args)
            choice = next(name for name in ORDER if name in reasons and reasons[name] is None)
            if len(self._choices) > 4096:  # shapes vary without bound only in a long-lived server
                self._choices.clear()
            self._choices[key] = choice
        return choice

    def __call__(self, *args):
        return self.backends[self.choose(*args)].run(*args)


def _key(argument):
    if isinstance(argument, torch.Tensor):
        # alignment matters to vector loads, so the low address bits belong to the key
        pointer = argument.data_ptr() & 15 if argument.device.type == "cuda" else 0
        return (argument.device, argument.dtype, argument.shape, argument.stride(), pointer)
    return argument


@contextlib.contextmanager
def use_backend(name: str):
    """Explicit choice for this thread: every op called inside runs on ``name`` or raises :class:`BackendUnavailable`."""
    previous = getattr(_local, "backend", None)
    _local.backend = name
    try:
        yield
    finally:
        _local.backend = previous

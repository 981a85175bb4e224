"""Which implementation of an op runs, and why the others do not.

An :class:`Op` owns its reference (the numerical contract) and its backends. Each backend carries a :class:`Constraints` table;
:meth:`Op.reasons` prints the first failing rule per backend, so "why did this not run?" always has an answer.
An automatic choice takes the first eligible backend in ``ORDER`` and ends at ``eager``; an explicit one (:func:`use_backend`)
raises when that backend cannot run.

A choice is made once per distinct set of shapes, strides, dtypes, devices and alignments and remembered; the call itself then
costs one dictionary look-up. Nothing falls back inside a launch.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

ORDER = ("cuda", "triton", "eager")
_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
_MAX_CHOICES = 4096  # shapes vary without bound only in a long-lived server
log = logging.getLogger("h3_vortex")


class _Explicit(threading.local):
    backend: str | None = None


_explicit = _Explicit()


class BackendUnavailable(RuntimeError):
    """A backend cannot run this call; the message names the failing constraint."""


@dataclass(frozen=True)
class Rule:
    """``holds(arguments)`` must be true; ``text`` completes the sentence "needs ..."."""

    text: str
    holds: Callable[[Mapping[str, object]], bool]


@dataclass(frozen=True)
class Constraints:
    """What a backend needs. Tensors are looked up by argument name in ``dtypes``; others are free."""

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
        first = next(iter(tensors.values())).device
        for name, tensor in tensors.items():
            if tensor.device.type not in self.devices:
                return f"needs {' or '.join(sorted(self.devices))} tensors, {name} is on {tensor.device.type}"
            if tensor.device != first:
                return f"needs all tensors on one device, {name} is on {tensor.device} and {next(iter(tensors))} on {first}"
        for name, allowed in self.dtypes.items():
            tensor = arguments[name]
            if tensor is not None and tensor.dtype not in allowed:
                names = " or ".join(sorted(str(d).removeprefix("torch.") for d in allowed))
                return f"needs {name} in {names}, got {str(tensor.dtype).removeprefix('torch.')}"
        if self.min_capability is not None:
            capability = torch.cuda.get_device_capability(first)
            if capability < self.min_capability:
                wanted = ".".join(map(str, self.min_capability))
                return f"needs compute capability {wanted}, got {capability[0]}.{capability[1]}"
        for rule in self.rules:
            if not rule.holds(arguments):
                return f"needs {rule.text}"
        return None


class Planned:
    """A backend's ``run`` in two steps: ``plan(*args)`` does whatever depends on shapes, strides, dtypes and alignment alone (choose
    and compile a kernel, work out the grid) and returns ``launch(*args)``, which :class:`Op` keeps for further calls of that kind.

    A launch must hold no tensor. A plan that cannot be made raises :class:`BackendUnavailable`; the automatic choice then says
    so once and goes on to the next backend.
    """

    def __init__(self, plan: Callable[..., Callable]):
        self.plan = plan

    def __call__(self, *args):
        return self.plan(*args)(*args)


@dataclass
class Backend:
    run: Callable
    constraints: Constraints
    disabled: str | None = None


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
        self.reference = reference
        self.signature = signature
        self.check = check
        self.backends: dict[str, Backend] = {"eager": Backend(reference, Constraints(_DEVICES))}
        self._choices: dict[tuple, tuple[str, Callable | None]] = {}
        self._failed_plans: dict[str, str] = {}
        Op.registry[name] = self

    def add_backend(self, name: str, run: Callable, constraints: Constraints) -> None:
        """``run`` takes the op's arguments; a :class:`Planned` one is planned once per kind of call."""
        if name not in ORDER:
            raise ValueError(f"{self.name}: backend {name!r} is not one of {', '.join(ORDER)}")
        self.backends[name] = Backend(run, constraints)
        self._choices.clear()

    def disable(self, name: str, reason: str) -> None:
        """Switch a backend off for the process; ``reason`` shows in :meth:`reasons`. The reference cannot be switched off."""
        if name == "eager" or name not in self.backends:
            raise ValueError(f"{self.name}: there is no backend {name!r} to switch off; it has {', '.join(self.backends)}")
        self.backends[name].disabled = reason
        self._choices.clear()

    def enable(self, name: str) -> None:
        """Undo :meth:`disable`."""
        self.backends[name].disabled = None
        self._choices.clear()

    def reason(self, name: str, *args) -> str | None:
        """None when backend ``name`` could run this call, else the failing constraint in words."""
        backend = self.backends.get(name)
        if backend is None:
            return f"does not exist for this op (it has {', '.join(self.backends)})"
        if backend.disabled:
            return backend.disabled
        return backend.constraints.reason(dict(zip(self.signature, args, strict=True)))

    def reasons(self, *args) -> dict[str, str | None]:
        """For each backend: None when it could run this call, else the failing constraint."""
        return {name: self.reason(name, *args) for name in ORDER if name in self.backends}

    def choose(self, *args) -> str:
        """The backend an automatic call takes, or the explicit one. Raises :class:`BackendUnavailable` for the latter."""
        return self._choice(args)[0]

    def __call__(self, *args):
        name, launch = self._choices.get(_key(_explicit.backend, args)) or self._choice(args)
        return launch(*args) if launch is not None else self.backends[name].run(*args)

    def _choice(self, args) -> tuple[str, Callable | None]:
        wanted = _explicit.backend
        key = _key(wanted, args)
        choice = self._choices.get(key)
        if choice is None:
            if self.check is not None:
                self.check(*args)
            for name in ORDER if wanted is None else (wanted,):
                if wanted is None and name not in self.backends:
                    continue
                reason = self.reason(name, *args)
                launch = None
                if reason is None:
                    launch, reason = self._planned(name, args)
                if reason is None:
                    choice = (name, launch)
                    break
                if wanted is not None:
                    raise BackendUnavailable(f"{self.name}: backend {name} {reason}")
            if len(self._choices) >= _MAX_CHOICES:
                self._choices.clear()
            self._choices[key] = choice
        return choice

    def _planned(self, name, args) -> tuple[Callable | None, str | None]:
        run = self.backends[name].run
        if not isinstance(run, Planned):
            return None, None
        try:
            return run.plan(*args), None
        except BackendUnavailable as error:
            reason = str(error)
        if self._failed_plans.get(name) != reason:
            self._failed_plans[name] = reason
            log.warning("H3 Vortex: %s: backend %s is not used: %s", self.name, name, reason)
        return None, reason


class Variants(dict):
    """The ops of one public function by the value of the argument that selects among them; another value is a ValueError."""

    def __init__(self, argument: str, **ops: Op):
        super().__init__(ops)
        self.argument = argument

    def __missing__(self, value):
        raise ValueError(f"{next(iter(self.values())).name}: {self.argument} is {value!r}: use {' or '.join(self)}")


def _key(wanted, args) -> tuple:
    parts = [wanted]
    for argument in args:
        if isinstance(argument, torch.Tensor):
            # alignment matters to vector loads, so the low address bits belong to the key
            parts += argument.shape, argument.stride(), argument.dtype, argument.device, argument.data_ptr() & 15
        else:
            parts.append(argument)
    return tuple(parts)


@contextlib.contextmanager
def use_backend(name: str):
    """Explicit choice for this thread: every op called inside runs on ``name`` or raises :class:`BackendUnavailable`."""
    previous = _explicit.backend
    _explicit.backend = name
    try:
        yield
    finally:
        _explicit.backend = previous

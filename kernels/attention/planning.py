"""One run's attention: chosen once, then the same backend until the run ends."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import cache
from . import measure, registry
from .backend import EXACTNESS, AttentionUnavailable, Backend, Verdict, guard
from .call import Call
from .environment import Environment

log = logging.getLogger("h3_vortex")
_said: set[str] = set()
_small_runs: dict[tuple, str | None] = {}  # (backend, device, dtype, head width) -> what a small run said, for the life of the process


@dataclass(frozen=True)
class Host:
    """What else in the workflow chooses attention.

    Args:
        override: who installed an attention override on the model (a node's name), None when nobody did.
        declared: the attention that the checkpoint asks for, None when it asks for none.
        stock: what the host's own attention is here. Flags change it, and a measurement against one says nothing about another.
    """

    override: str | None = None
    declared: str | None = None
    stock: str = ""


def say_once(line: str) -> None:
    """Log ``line`` the first time in this process that it would be said."""
    if line not in _said:
        _said.add(line)
        log.warning("H3 attention: %s", line)


def plan(choice: str, *, host: Host | None = None, pause=contextlib.nullcontext, env: Environment | None = None) -> "Plan":
    """Decide how one run computes attention. Make one per sampling run, before its first model call, and keep it to the end.

    Args:
        choice: ``stock (exact)``, ``fastest dense`` or a name of :data:`.registry.CHOICES`.
        host: what else chooses attention.
        pause: makes a context in which one-off work may allocate and free (``comfy.model_prefetch.pause_malloc_graph`` where there is one).
            It is entered inside the first call, so that call must not be made inside a pause: they do not nest.
        env: the machine; by default the one of the first call's device.

    Returns:
        :class:`Plan`. What can only be known from q, k and v (lengths, strides, speed) is decided at its first call.

    Raises:
        ValueError: unknown choice. AttentionUnavailable: a backend by name beside another node's attention override, or (when ``env`` is
        given) one this machine cannot run.
    """
    host = host or Host()
    if choice not in (registry.STOCK, registry.FASTEST):
        backend = registry.backend(choice)
        if host.override:
            raise AttentionUnavailable(
                f"H3 attention: two nodes choose it: {host.override} overrides the model's attention and this one asks for {choice}. "
                f"Remove the other node, or choose {registry.STOCK!r} here to keep its choice"
            )
        missing = backend.missing(env) if env is not None else None
        if missing:
            raise AttentionUnavailable(f"H3 attention: {choice} {missing}")
    return Plan(choice, host, pause, env)


def insist(choice: str, reason: str) -> None:
    """Raise AttentionUnavailable when, for ``reason``, another attention would run in place of a backend that was asked for by name."""
    if choice not in (registry.STOCK, registry.FASTEST):
        raise AttentionUnavailable(f"H3 attention: {choice} was asked for, but: {reason}. Choose {registry.STOCK!r}")


class Plan:
    """Callable ``plan(q, k, v, stock, prefix_rows=0) -> [S, H*D]``; see :func:`plan`. ``report()`` says what ran and why."""

    def __init__(self, choice: str, host: Host, pause, env: Environment | None):
        self.choice, self.host = choice, host
        self._pause, self._env = pause, env
        self._queue: list[Backend | None] = []  # what fastest dense may still choose, best first; None is stock
        self._chosen: Backend | None = None
        self._decided = self._started = False
        self._verdicts: dict[Call, Verdict] = {}
        self._why = self._record = None
        self.calls, self.copied = 0, Counter()
        self.errors: dict[int, float] = {}
        if choice == registry.STOCK:
            self._settle(None, "the default")
        elif choice == registry.FASTEST and host.override:
            self._settle(None, f"{host.override} overrides the model's attention, and its choice is kept")
            say_once(f"{registry.FASTEST!r} steps aside: {self._why}")
        elif choice != registry.FASTEST:
            self._settle(registry.backend(choice), "asked for by name")

    @property
    def is_stock(self) -> bool:
        """Decided for stock: the host may call its own attention without this object, which then counts nothing."""
        return self._decided and self._chosen is None

    # ------------------------------------------------------------------------------------------------------- running
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stock: Callable, prefix_rows: int = 0) -> torch.Tensor:
        """Attention of one block.

        Args:
            q, k, v: ``[1, S, H, D]`` views, any row stride; read only.
            stock: ``stock(q, k, v) -> [S, H*D]``: what the host would run, with its overrides and preferences, for *any* number of heads.
            prefix_rows: rows ahead of the video (text, references, audio), for sparse attention.

        Returns:
            ``[S, H*D]``, token-major, in q's dtype.

        Raises:
            AttentionUnavailable: the backend asked for cannot run this call, or a run that has begun would have to change its backend.
        """
        if self.is_stock:
            self.calls += 1
            return stock(q, k, v)
        call = Call.of(q, k, v)
        verdict = self._verdicts.get(call)
        if verdict is None:
            return self._first(q, k, v, stock, prefix_rows, call)
        self.calls += 1
        self.copied.update(verdict.copies)
        return self._chosen.launch(q, k, v, verdict.copies, prefix_rows)

    def _first(self, q, k, v, stock, prefix_rows, call: Call) -> torch.Tensor:
        """The first call of its layout: decide if nothing is decided, guard, launch, and check the result where it runs."""
        env = self._env = self._env or Environment.of(q.device)
        if not self._decided:
            with self._pause():
                self._rank(q, k, v, stock, call, env)
        while not self.is_stock:
            verdict, reason = self._judge(call, env)
            out = None
            if reason is None:
                out = self._chosen.launch(q, k, v, verdict.copies, prefix_rows)
                reason = self._check(q, k, v, out)
            if reason is None:
                break
            del out
            self._next(reason, call)
        self._started = True
        self.calls += 1
        if self.is_stock:
            return stock(q, k, v)
        if verdict.copies:
            size = call.tensor_bytes * len(verdict.copies) / 1e9
            say_once(f"{self._chosen.name} copies {', '.join(verdict.copies)} ({size:.2f} GB) in every block: {verdict.why_copies}")
        self._verdicts[call] = verdict
        self.copied.update(verdict.copies)
        return out

    def _judge(self, call: Call, env: Environment) -> tuple[Verdict, str | None]:
        backend = self._chosen
        verdict = guard(backend, call, env)
        if verdict.refusal is not None or not backend.pausable:
            return verdict, verdict.refusal
        key = (backend.name, call.device, call.dtype, call.head_dim)
        if key not in _small_runs:
            with self._pause():
                _small_runs[key] = measure.small_run(backend, call.device, call.dtype, call.head_dim)
        return verdict, _small_runs[key]

    def _check(self, q, k, v, out) -> str | None:
        """Is this output attention? Once per length and run, on rows up to the last."""
        with self._pause():
            error = measure.relative_error(q, k, v, out)
        self.errors[q.shape[1]] = error
        if measure.acceptable(error, self._chosen):
            return None
        return f"is off by {error:.1%} from exact attention at {q.shape[1]:,} rows"

    # ------------------------------------------------------------------------------------------------------ deciding
    def _settle(self, backend: Backend | None, why: str) -> None:
        self._chosen, self._decided, self._why = backend, True, why

    def _rank(self, q, k, v, stock, call: Call, env: Environment) -> None:
        if self.host.declared:
            say_once(f"{registry.FASTEST!r} outranks the checkpoint's preference ({self.host.declared}); {registry.STOCK!r} keeps it")
        if env.device.type != "cuda":
            self._settle(None, "nothing to measure without a CUDA device")
            return
        candidates = registry.automatic()
        name = measure.cache_name(call, env, candidates, self.host.stock)
        self._record = measure.remembered(name, candidates)
        source = "measured earlier on this machine"
        if self._record is None:
            source = "measured now"
            self._record = measure.search(q, k, v, candidates, stock, env)
            if not measure.ran_out_of_memory(self._record):  # which says nothing about the next run
                cache.write_json(measure.KIND, name, measure.VERSION, self._record)
        order = measure.ranking(self._record)
        self._queue = [None if n == "stock" else registry.backend(n) for n in order] or [None]
        self._settle(self._queue.pop(0), source)
        log.info("H3 attention: %s", self.line())

    def _next(self, reason: str, call: Call) -> None:
        """Leave the chosen backend for the next one, or raise: by name always, in mid-run always."""
        name = self._chosen.name
        if self._started:
            raise AttentionUnavailable(
                f"H3 attention: this run began with {name}, which now {reason}. Another backend in mid-run would change the picture; "
                f"start again with {registry.STOCK!r} or a shorter or smaller video"
            )
        if self.choice != registry.FASTEST:
            raise AttentionUnavailable(f"H3 attention: {name} {reason}. Choose {registry.STOCK!r} or {registry.FASTEST!r} on the node")
        following = self._queue.pop(0) if self._queue else None
        self._settle(following, f"{name} was faster but {reason}")
        say_once(f"{name} {reason}; using {following.name if following else 'stock'} at {call.rows:,} rows")

    # ----------------------------------------------------------------------------------------------------- reporting
    @property
    def backend(self) -> str | None:
        """Name of the chosen backend, "stock", or None before the first call has decided."""
        return None if not self._decided else self._chosen.name if self._chosen else "stock"

    @property
    def exactness(self) -> str | None:
        """E0..E3 of the chosen backend: E0 for stock, and for one whose bytes were equal to stock's when it was measured here."""
        if not self._decided:
            return None
        if self._chosen is None:
            return "E0"
        entry = (self._record or {"candidates": {}})["candidates"].get(self._chosen.name, {})
        return "E0" if entry.get("equal_to_stock") else self._chosen.exactness

    def line(self) -> str:
        """One line for the report: backend, class, why."""
        if not self._decided:
            return f"{self.choice}: not decided yet"
        return f"{self.backend} ({self.exactness}, {EXACTNESS[self.exactness]}): {self._why}"

    def report(self) -> dict:
        """``choice, backend, exactness, why, calls, copies, relative_error`` (by rows, to float64 attention) and ``measured`` lines."""
        return {
            "choice": self.choice,
            "backend": self.backend,
            "exactness": self.exactness,
            "why": self._why,
            "calls": self.calls,
            "copies": dict(self.copied),
            "relative_error": dict(self.errors),
            "measured": measure.table(self._record) if self._record else [],
        }


"""What ran, what did not and why: per accelerated model, per run, and for the whole process (``GET /h3_vortex/status``).

Holds numbers and words only, never a tensor. Counts are collected per model call and merged when the call ends.
"""

import logging
import re
import threading
import time
import weakref
from collections import Counter
from pathlib import Path

from . import verification

log = logging.getLogger("h3_vortex")
_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
STREAMED_BELOW = 0.95  # of the weights; buffers that ComfyUI keeps elsewhere are no streaming
_process = {"warm": False, "runs": 0, "complete_runs": 0, "last_run": None}


def pack_version() -> str:
    """The version that pyproject.toml states."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    return next(line.split('"')[1] for line in text.splitlines() if line.startswith("version"))


def _no_patcher():
    """In place of a weak reference, where no patcher is known."""
    return None


class Calls:
    """Counts of one model call, or of many: fused calls per (op, backend), stock calls per (op, reason)."""

    def __init__(self):
        self.fused: Counter = Counter()
        self.stock: Counter = Counter()

    def merge(self, other: "Calls") -> None:
        self.fused.update(other.fused)
        self.stock.update(other.stock)

    def table(self) -> dict:
        """``{op: {"fused": {backend: calls}, "stock": {reason: calls}}}``, ops in alphabetical order."""
        rows: dict = {}
        for kind, counts in (("fused", self.fused), ("stock", self.stock)):
            for (op, detail), calls in sorted(counts.items()):
                rows.setdefault(op, {"fused": {}, "stock": {}})[kind][detail] = calls
        return dict(sorted(rows.items()))


def residency(patcher) -> dict | None:
    """How much of a model lies on its GPU: ``{"resident_bytes", "bytes"}`` of its weights.

    None on the CPU, where nothing is transferred, and for a patcher that does not tell.
    """
    told = [getattr(patcher, name, None) for name in ("loaded_size", "model_size")]
    device = getattr(patcher, "load_device", None)
    if getattr(device, "type", "cpu") == "cpu" or not all(map(callable, told)):
        return None
    loaded, size = (int(tell()) for tell in told)
    return {"resident_bytes": min(loaded, size), "bytes": size}  # dynamic VRAM counts whole pages, so a little more than there is


def residency_line(weights: dict) -> str:
    """One line for a person on what :func:`residency` gave."""
    told = f"{weights['resident_bytes'] / 1e9:.1f} of {weights['bytes'] / 1e9:.1f} GB resident"
    if weights["resident_bytes"] >= STREAMED_BELOW * weights["bytes"]:
        return f"weights: {told}"
    return f"weights are streamed: {told}; where the transfer takes longer than the arithmetic it decides the speed, not the kernels"


class Session:
    """The state of one accelerated model: its features and what its calls did. Shared by later clones of the same patcher."""

    def __init__(self, mode: str, attention: str):
        self.mode = mode
        self.attention_choice = attention
        self.lock = threading.Lock()
        self.total, self.run = Calls(), Calls()
        self.calls = self.run_calls = self.rows = 0
        self.attention: dict = {}
        self.attention_plans: dict = {}  # this run's, by device; made at its first model call
        self.stepped_aside: str | None = None
        self.device: str | None = None
        self.core: str | None = None
        self.layers: dict[str, int] = {}
        self.measuring = False
        self.weights: dict | None = None  # residency at the last model call
        self._patcher = _no_patcher
        self._warned: set[str] = set()
        _sessions.add(self)

    def start_run(self, patcher=None) -> None:
        """``patcher``: the ModelPatcher that this run samples with; only a weak reference is kept."""
        with self.lock:
            self.run, self.run_calls, self.attention_plans = Calls(), 0, {}
            self.weights, self._patcher = None, _no_patcher if patcher is None else weakref.ref(patcher)

    def finish_call(self, calls: Calls, rows: int) -> None:
        self.note_weights()
        with self.lock:
            self.run.merge(calls)
            self.total.merge(calls)
            self.calls += 1
            self.run_calls += 1
            self.rows = rows

    def note_weights(self) -> None:
        """Note where the weights are, at the end of a model call: when a run has ended they may already make room."""
        self.weights = residency(self._patcher())

    def step_aside(self, reason: str) -> None:
        """The whole model runs stock for this reason; said once."""
        self.stepped_aside = reason
        self.warn_once(reason)

    def warn_once(self, text: str) -> None:
        with self.lock:
            if text in self._warned:
                return
            self._warned.add(text)
        log.warning("%s", text)

    def finish_run(self, seconds: float, complete: bool) -> dict:
        """Log one line about the run that just ended and keep it for the status route."""
        summary = {
            "complete": complete, "model_calls": self.run_calls, "packed_rows": self.rows, "seconds": round(seconds, 3),
            "attention": dict(self.attention), "ops": self.run.table(), "stepped_aside": self.stepped_aside,
            "weights": self.weights}
        _process["runs"] += 1
        _process["complete_runs"] += complete
        _process["last_run"] = summary
        fused, stock = sum(self.run.fused.values()), sum(self.run.stock.values())
        note = f"; {self.stepped_aside}" if self.stepped_aside else ""
        note += f"; {residency_line(self.weights)}" if self.weights else ""
        log.info(
            "H3 Vortex: %s run, %d model calls of %d rows in %.2f s: %d fused calls, %d stock calls, attention %s (%s)%s",
            "complete" if complete else "interrupted", self.run_calls, self.rows, seconds, fused, stock,
            self.attention.get("backend", "not reached"), self.attention.get("class", "-"), note)
        return summary

    def report(self) -> dict:
        """JSON-ready state; see :func:`.comfyui.report`."""
        with self.lock:
            return {
                "mode": self.mode, "pack": pack_version(), "core": self.core, "device": self.device, "stepped_aside": self.stepped_aside,
                "attention": {"choice": self.attention_choice, **self.attention}, "model_calls": self.calls, "packed_rows": self.rows,
                "layers": self.layers, "weights": self.weights,
                "ops": self.total.table(), "last_run_ops": self.run.table(), "timings": verification.timings(),
                "verification": verification.summary()}


def glance(state: dict) -> str:
    """A few lines for a person, from :meth:`Session.report`: what ran, what was verified, what took stock's code and why."""
    weights = [residency_line(state["weights"])] if state["weights"] else []
    if state["stepped_aside"]:
        return "\n".join([f"ran as stock: {state['stepped_aside'].removeprefix('H3 Vortex: ')}", *weights])
    fused, stock = Counter(), Counter()
    for counts in state["last_run_ops"].values():
        fused.update(counts["fused"])
        stock.update(counts["stock"])
    lines = [f"{fused.total()} fused calls" + (f" ({', '.join(sorted(fused))})" if fused else "") + f", {stock.total()} stock calls"]
    lines += [f"  stock: {calls} x {reason}" for reason, calls in stock.most_common(3)]
    verdicts = state["verification"]
    wrong = [case for case, verdict in verdicts.items() if not verdict["equal"]]
    lines.append(f"verified: {len(verdicts) - len(wrong)} of {len(verdicts)} checks gave stock's bytes")
    lines += [f"  OFF: {case}" for case in wrong]
    attention = state["attention"]
    lines.append(f"attention: {attention.get('backend', 'not reached')} ({attention.get('class', '-')}), chosen: {attention['choice']}")
    return "\n".join(lines + weights)


class timed_run:
    """Context of one sampling run: resets the run's counts, and reports them at its end, interrupted or not."""

    def __init__(self, session: Session, patcher=None):
        self.session, self.patcher = session, patcher

    def __enter__(self):
        self.session.start_run(self.patcher)
        self.start = time.perf_counter()
        return self

    def __exit__(self, kind, error, trace):
        self.session.finish_run(time.perf_counter() - self.start, kind is None)
        return False


def mark_warm() -> None:
    """H3 Warmup finished: kernels are compiled and verified for its model and shape."""
    _process["warm"] = True


def status() -> dict:
    """What ``GET /h3_vortex/status`` answers. ``ready``: a warm-up or a complete run has happened in this process. No paths, no prompts."""
    return without_paths({
        "pack": pack_version(), "ready": _process["warm"] or _process["complete_runs"] > 0, **_process,
        "models": [session.report() for session in list(_sessions)], "verification": verification.summary()})


_FOLDERS = re.compile(r"""(?<![\w.])(?:[A-Za-z]:[\\/]|\\\\|~?/)(?:[^\\/\n"'<>|:;,]*[\\/])*""")


def without_paths(value):
    """``value`` (what JSON holds) with the folders cut off every absolute path in its texts: a reason may quote a library's error."""
    if isinstance(value, dict):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value

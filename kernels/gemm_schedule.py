"""Fixed cuBLASLt schedules for H3's projections: searched on the user's GPU, proved byte-equal to stock, cached.

A schedule is accepted for one (layer kind, problem, GPU, library version) only if its output equals the stock GEMM's byte for byte on
real tensors of that layer *and* it is faster by more than the noise of this very measurement. Anything else runs stock.

Nothing here may run while a CUDA graph is captured or a host records allocations: the caller searches before sampling.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import cache, nvrtc
from .cublaslt import Algorithm, Capability, Config, CublasLtError, Matmul, Problem, unavailable_reason, version

log = logging.getLogger("h3_vortex")
CACHE_VERSION = 1
WORKSPACES = (0, 4 << 20, 32 << 20)  # bytes offered to the heuristic; torch itself offers 32 MiB on Hopper and newer
# algo 70, tile 20, stages 37, split-K 1: measured 3.4x faster than the default for NVFP4 FC2 at 37,810 rows on a GB10 (not by this project)
KNOWN = {"nvfp4": Config(id=70, tile=20, split_k=1, reduction=0, swizzle=0, custom=0, stages=37, inner_shape=0, cluster=0)}
OUT_OF_MEMORY = "out of memory while schedules were compared"
SETTLED = (7, 8, 15, 16)  # statuses that speak of the problem and the GPU rather than of the moment: cublaslt.STATUS
MIN_GAIN = 0.01  # a schedule must win by 1 % or by three times the stock timing's own spread, whichever is more


@dataclass(frozen=True)
class Operands:
    """One data set for a problem. For fp8 and nvfp4 the scales are those of :meth:`.cublaslt.Matmul.run`."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor | None = None
    w_scale: torch.Tensor | None = None
    alpha: torch.Tensor | None = None


@dataclass
class Candidate:
    config: Config
    origin: str
    verdict: str = "not tried"  # "exact", "differs", "refused: ...", "not tried"
    ms: float | None = None


@dataclass
class Outcome:
    """What a search found: ``config`` is None when stock stays, and ``reason`` says why in words.

    ``passing``: the reason says nothing about the next process (no memory, a handle that could not be made), so it is not remembered.
    """

    problem: Problem
    config: Config | None
    reason: str
    stock_ms: float | None = None
    best_ms: float | None = None
    candidates: list[Candidate] = field(default_factory=list)
    seconds: float = 0.0
    passing: bool = False

    def as_dict(self) -> dict:
        return {
            "problem": str(self.problem), "config": self.config.as_dict() if self.config else None, "reason": self.reason,
            "stock_ms": self.stock_ms, "best_ms": self.best_ms, "seconds": self.seconds,
            "ratio": self.stock_ms / self.best_ms if self.stock_ms and self.best_ms else None,
            "tried": sum(c.verdict != "not tried" for c in self.candidates),
            "exact": sum(c.verdict == "exact" for c in self.candidates),
            "differs": sum(c.verdict == "differs" for c in self.candidates),
        }


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Byte equality (NaN equals the same NaN) of two tensors of one dtype and shape."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def candidates(matmul: Matmul, extra: Sequence[tuple[str, Config]] = ()) -> list[tuple[str, Algorithm]]:
    """Algorithms worth trying, each once: ``extra``, known schedules, the heuristic's at several workspace sizes, neighbours of its guess.

    What was fast somewhere comes first, because a large problem has time for a few only. Neighbours keep split-K and the reduction
    scheme, whose change alters the order of summation and hence bits.
    Raises :class:`.cublaslt.CublasLtError` when the library has none for this problem.
    """
    found: dict[Config, tuple[str, Algorithm]] = {}
    refusal = None
    known = KNOWN.get(matmul.problem.kind)
    _build(matmul, [*extra, *([("known", known)] if known else [])], found)
    guesses = []
    for workspace in WORKSPACES:
        try:
            for algorithm in matmul.heuristics(workspace):
                guesses.append(algorithm.config)
                found.setdefault(algorithm.config, ("heuristic", algorithm))
        except CublasLtError as error:
            refusal = error
    if guesses:
        first = guesses[0]
        wanted = [("neighbour", replace(first, swizzle=1 - min(first.swizzle, 1)))]
        wanted += [("neighbour", replace(first, tile=tile)) for tile in matmul.capability(first.id, Capability.TILE_IDS)]
        wanted += [("neighbour", replace(first, stages=stages)) for stages in matmul.capability(first.id, Capability.STAGES_IDS)]
        _build(matmul, wanted, found)
    if not found and refusal is not None:
        raise refusal
    return list(found.values())


def _build(matmul: Matmul, wanted: Sequence[tuple[str, Config]], found: dict[Config, tuple[str, Algorithm]]) -> None:
    """Add what the library accepts of ``wanted`` to ``found``."""
    for origin, config in wanted:
        if config in found:
            continue
        try:
            algorithm = matmul.build(config)
        except CublasLtError:
            continue  # the library refuses this combination here; nothing was launched
        if algorithm.workspace <= WORKSPACES[-1]:
            found[config] = (origin, algorithm)


def _timed(functions: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each function, alternating between them in one loop so that clocks and power act on all alike."""
    with torch.cuda.device(device):
        events = [[(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in functions] for _ in range(rounds)]
        for row in events:
            for (start, stop), function in zip(row, functions, strict=True):
                start.record()
                function()
                stop.record()
        torch.cuda.synchronize()
        return [[row[i][0].elapsed_time(row[i][1]) for row in events] for i in range(len(functions))]


def search(
    problem: Problem, data: Sequence[Operands], stock: Callable[[Operands], torch.Tensor], seconds: float = 1.0,
    extra: Sequence[tuple[str, Config]] = (),
) -> Outcome:
    """Find the fastest schedule that is byte-equal to ``stock`` on every data set.

    Args:
        problem: shape and types. data: data sets, the first one is also timed. stock: the GEMM the host would run, ``[m, n]``.
        seconds: time budget for trying candidates; what is not reached stays "not tried".
        extra: configurations to try besides the usual ones, with the name of their origin.
    """
    reason = unavailable_reason()
    if reason:
        return Outcome(problem, None, reason)
    started = time.perf_counter()
    try:
        return _search(problem, data, stock, seconds, extra, started)
    except CublasLtError as error:
        reason, passing = str(error), error.status not in SETTLED
    except torch.OutOfMemoryError:  # the tensors of the search go with its frame, before stock runs
        reason, passing = OUT_OF_MEMORY, True
    return Outcome(problem, None, reason, seconds=time.perf_counter() - started, passing=passing)


def _search(problem, data, stock, seconds, extra, started) -> Outcome:
    device = data[0].x.device
    matmul = Matmul(problem, device)
    pool = candidates(matmul, extra)
    outcome = Outcome(problem, None, "", candidates=[Candidate(a.config, origin) for origin, a in pool])
    references = [stock(d) for d in data]
    out = torch.empty_like(references[0])
    workspace = torch.empty(max(1, max(a.workspace for _, a in pool)), dtype=torch.uint8, device=device)
    exact = []
    for row, (_, algorithm) in zip(outcome.candidates, pool, strict=True):
        if time.perf_counter() - started > seconds:
            break
        row.verdict = _verdict(matmul, algorithm, data, references, out, workspace)
        if row.verdict == "exact":
            row.ms = min(_timed([lambda a=algorithm: _run(matmul, a, data[0], out, workspace)], 2, device)[0])
            exact.append((row, algorithm))
    if exact:
        exact.sort(key=lambda pair: pair[0].ms)
        finalists = exact[:4]
        times = _timed(
            [lambda: stock(data[0]), *(lambda a=a: _run(matmul, a, data[0], out, workspace) for _, a in finalists)], 9, device)
        medians = [statistics.median(t) for t in times]
        outcome.stock_ms = medians[0]
        spread = 3 * statistics.median(abs(t - medians[0]) for t in times[0])
        for (row, _), median in zip(finalists, medians[1:], strict=True):
            row.ms = median
        best, algorithm = min(finalists, key=lambda pair: pair[0].ms)
        outcome.best_ms = best.ms
        needed = max(spread, MIN_GAIN * medians[0])
        if medians[0] - best.ms > needed:
            outcome.config = algorithm.config
            outcome.reason = f"{best.origin} schedule, {medians[0] / best.ms:.3f}x stock"
        else:
            outcome.reason = f"no exact schedule beats stock ({medians[0]:.3f} ms) by more than the noise (best {best.ms:.3f} ms)"
    else:
        outcome.reason = f"none of {sum(c.verdict != 'not tried' for c in outcome.candidates)} schedules gives stock's bytes"
    outcome.seconds = time.perf_counter() - started
    return outcome


def _run(matmul: Matmul, algorithm: Algorithm, data: Operands, out: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
    return matmul.run(
        algorithm, data.x, data.w, out, workspace if algorithm.workspace else None,
        x_scale=data.x_scale, w_scale=data.w_scale, alpha=data.alpha)


def _verdict(matmul, algorithm, data, references, out, workspace) -> str:
    for operands, reference in zip(data, references, strict=True):
        out.fill_(float("nan"))  # an algorithm that leaves part of the output unwritten must not pass on old bytes
        try:
            _run(matmul, algorithm, operands, out, workspace)
        except CublasLtError as error:
            return f"refused: {error}"
        if not same_bytes(out, reference):
            return "differs"
    return "exact"


class Schedules:
    """The schedules of this process: searched or read from the cache by :meth:`prepare`, used by :meth:`run`.

    A cached schedule is verified again on real tensors before its first use in each process; one that no longer gives stock's bytes
    is dropped with one log line.
    """

    def __init__(self):
        self.outcomes: dict[tuple[str, Problem, torch.device], Outcome] = {}
        self._ready: dict[tuple[str, Problem, torch.device], tuple[Matmul, Algorithm]] = {}

    def prepare(self, layer: str, problem: Problem, data: Sequence[Operands], stock, seconds: float = 1.0) -> Outcome:
        """Make sure the question is answered for ``layer`` (``fc2``, ``qkv``, ...); cheap when it already is."""
        device = data[0].x.device
        key = (layer, problem, device)
        if key in self.outcomes:
            return self.outcomes[key]
        reason = unavailable_reason()
        if reason:
            self.outcomes[key] = Outcome(problem, None, reason)
            return self.outcomes[key]
        name = self._cache_name(layer, problem, device)
        outcome = self._from_cache(name, layer, problem, data, stock)
        if outcome is None:
            outcome = search(problem, data, stock, seconds)
            if not outcome.passing:
                cache.write_json("gemm", name, CACHE_VERSION, {
                    "config": outcome.config.as_dict() if outcome.config else None, "reason": outcome.reason,
                    "stock_ms": outcome.stock_ms, "best_ms": outcome.best_ms})
        log.info("H3 Vortex: %s %s: %s", layer, problem, outcome.reason)
        if outcome.config is not None:
            matmul = Matmul(problem, device)
            self._ready[key] = (matmul, matmul.build(outcome.config))
        self.outcomes[key] = outcome  # last: whoever sees it may run, also when the lines above failed once or another thread asks
        return outcome

    @staticmethod
    def _cache_name(layer: str, problem: Problem, device: torch.device) -> str:
        properties = torch.cuda.get_device_properties(device)
        return cache.digest(
            layer, problem, properties.name, properties.multi_processor_count, version(), nvrtc.driver_version(),
            torch.__version__, cache.version("comfy-kitchen"), cache.sources()) + ".json"  # kitchen: whose GEMM stock is

    @staticmethod
    def _from_cache(name, layer, problem, data, stock) -> Outcome | None:
        saved = cache.read_json("gemm", name, CACHE_VERSION)
        times = ("stock_ms", "best_ms")
        if saved is None or any(saved.get(key) is not None and type(saved[key]) not in (int, float) for key in times):
            return None
        if saved.get("config") is None:
            return Outcome(problem, None, f"{saved.get('reason')} (cached)", saved.get("stock_ms"), saved.get("best_ms"))
        try:
            if not all(type(value) is int for value in dict(saved["config"]).values()):
                raise TypeError("its configuration is not made of integers")
            config = Config(**saved["config"])
            matmul = Matmul(problem, data[0].x.device)
            algorithm = matmul.build(config)
        except (TypeError, ValueError, CublasLtError) as error:
            log.warning("H3 Vortex: the cached %s schedule for %s is not valid here (%s); searching again", layer, problem, error)
            return None
        try:
            references = [stock(d) for d in data]
            workspace = torch.empty(max(1, algorithm.workspace), dtype=torch.uint8, device=data[0].x.device)
            verdict = _verdict(matmul, algorithm, data, references, torch.empty_like(references[0]), workspace)
        except torch.OutOfMemoryError:
            return Outcome(problem, None, OUT_OF_MEMORY, passing=True)
        if verdict != "exact":
            log.warning("H3 Vortex: cached %s schedule for %s no longer gives stock's bytes (%s); searching again", layer, problem, verdict)
            return None
        return Outcome(problem, config, f"{saved.get('reason')} (cached, verified)", saved.get("stock_ms"), saved.get("best_ms"))

    def known(self, layer: str, problem: Problem, device: torch.device) -> Outcome | None:
        """The answer of an earlier :meth:`prepare` in this process, or None."""
        return self.outcomes.get((layer, problem, device))

    def has(self, layer: str, problem: Problem, device: torch.device) -> bool:
        return (layer, problem, device) in self._ready

    def run(self, layer: str, problem: Problem, data: Operands, out_dtype: torch.dtype) -> torch.Tensor:
        """The accepted schedule on fresh operands: a new ``[m, n]`` tensor. Call only when :meth:`has` says yes."""
        matmul, algorithm = self._ready[layer, problem, data.x.device]
        out = torch.empty(problem.m, problem.n, dtype=out_dtype, device=data.x.device)
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=data.x.device) if algorithm.workspace else out
        return _run(matmul, algorithm, data, out, workspace)

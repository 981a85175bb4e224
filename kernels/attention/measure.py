"""``fastest dense``: the installed dense backends timed on the run's own q, k, v, once per GPU, versions and shape, kept on disk.

Every candidate runs on a slice of the heads first (cheap, and it warms libraries up), then stock and the fastest few at the full shape.
The error is the relative L2 distance to float64 softmax attention on rows from the whole sequence, its end included: an index that
overflows shows there. Nothing here is allocated before the call or survives it, so the caller may hold an allocation graph paused.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable

import torch

from .. import cache
from .backend import MAX_ERROR, Backend, guard
from .call import Call
from .environment import Environment

log = logging.getLogger("h3_vortex")

KIND, VERSION = "attention", 1
SLICE_HEADS = 8
REPEATS = 3
FINALISTS = 3
CLOSE = 1.15  # slice times within this factor of the best go to the full shape
TIE = 0.98  # a gain under 2 % does not leave stock: two runs of one step differ by 1-2 % between machines
BUDGET_SECONDS = 60.0
CHECK_ROWS, CHECK_TAIL = 128, 64


def relative_error(q, k, v, out, heads: Iterable[int] | None = None) -> float:
    """Relative L2 error of ``out`` ``[S, H*D]`` against float64 softmax attention, on rows spread over the sequence and its last ones.

    Args:
        q, k, v: ``[1, S, H, D]``. heads: which heads; the first and the last by default.
    """
    _, rows, count, head_dim = q.shape
    picked = torch.linspace(0, rows - 1, min(rows, CHECK_ROWS), device=q.device).long()
    picked = torch.cat([picked, torch.arange(max(0, rows - CHECK_TAIL), rows, device=q.device)]).unique()
    difference = norm = 0.0
    for head in sorted({0, count - 1}) if heads is None else heads:
        keys, values = k[0, :, head].double(), v[0, :, head].double()
        weights = torch.softmax(q[0, picked, head].double() @ keys.T * head_dim**-0.5, -1)
        exact = weights @ values
        got = out[:, head * head_dim : (head + 1) * head_dim][picked].double()
        difference += float((got - exact).square().sum())
        norm += float(exact.square().sum())
    return (difference / norm) ** 0.5 if norm else float("inf") if difference else 0.0


def acceptable(error: float, backend: Backend | None = None) -> bool:
    """Is a relative error within what ``backend`` may have (without one: what an automatic choice may have)? NaN never is."""
    return error <= (backend.max_error if backend else MAX_ERROR)


def small_run(backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """None when the backend computes attention on 1,088 random rows of a strided buffer, else what went wrong.

    What a version string cannot tell (a build without this GPU's kernels, a wrong stride rule) shows here and not in a video.
    """
    heads = 2
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(1, 1088, 3 * heads * head_dim, device=device, generator=generator).to(dtype)
    q, k, v = (t.unflatten(-1, (heads, head_dim)) for t in qkv.split(heads * head_dim, -1))
    failure = None
    try:
        error = relative_error(q, k, v, backend.launch(q, k, v))
    # Third-party kernels raise anything; the reason becomes the backend's state and no tensor outlives the except.
    except Exception as problem:
        failure = f"a small run failed: {type(problem).__name__}: {problem}"
    if failure is None and not acceptable(error, backend):
        failure = f"a small run is off by {error:.1%} from exact attention"
    return failure


def _clock(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """(result, milliseconds)."""
    if device.type != "cuda":
        start = time.perf_counter()
        out = call()
        return out, (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(torch.cuda.current_stream(device))
    out = call()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return out, begin.elapsed_time(end)


def _median_ms(call, device, deadline: float) -> tuple[torch.Tensor, float]:
    """Median of REPEATS calls, fewer when the deadline passes; the caller has warmed up."""
    times = []
    for _ in range(REPEATS):
        out, ms = _clock(call, device)
        times.append(ms)
        if time.monotonic() > deadline:
            break
    return out, statistics.median(times)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def cache_name(call: Call, env: Environment, backends: Iterable[Backend], stock: str = "") -> str:
    """File name of a result: GPU, driver, torch, the packages' versions, this pack, what stock is, the shape (rows to a quarter octave)."""
    packages = sorted({name for backend in backends for name in backend.distributions} | {"comfy-kitchen"})
    shape = (round(4 * math.log2(call.rows)), call.heads, call.head_dim, call.dtype, call.q.row_stride > call.inner)
    versions = [(name, env.version(name)) for name in packages]
    cudnn = torch.backends.cudnn.version() if env.device.type == "cuda" else None
    names = [backend.name for backend in backends]
    machine = (env.gpu, env.capability, env.driver, env.torch_version, env.cuda, env.hip, cudnn)
    return cache.digest(*machine, cache.sources(), versions, names, stock, shape) + ".json"


def remembered(name: str, backends: Iterable[Backend]) -> dict | None:
    """The record of :func:`search` kept under ``name``; None when there is none, or it is not what :func:`search` writes."""
    record = cache.read_json(KIND, name, VERSION)
    if record is None or not all(_positive(record.get(key)) for key in ("rows", "heads", "head_dim", "slice_heads")):
        return None
    candidates, known = record.get("candidates"), {"stock", *(backend.name for backend in backends)}
    whole = isinstance(candidates, dict) and set(candidates) <= known and all(map(_is_entry, candidates.values()))
    return record if whole else None


def ran_out_of_memory(record: dict) -> bool:
    """Was a candidate refused for want of memory, which another run may have?"""
    refusals = (entry.get("refused", "") for entry in record["candidates"].values())
    return any("OutOfMemoryError" in reason or "out of memory" in reason for reason in refusals)


def _is_entry(entry) -> bool:
    if not isinstance(entry, dict):
        return False
    if "slice_ms" not in entry:
        return isinstance(entry.get("refused"), str)
    return (
        _positive(entry["slice_ms"]) and _positive(entry.get("ms", 1)) and type(entry.get("error")) in (int, float)
        and isinstance(entry.get("equal_to_stock"), bool)
    )


def _positive(value) -> bool:
    return type(value) in (int, float) and value > 0


def search(q, k, v, candidates: Iterable[Backend], stock: Callable, env: Environment, budget: float = BUDGET_SECONDS) -> dict:
    """Time ``candidates`` and ``stock`` on ``q, k, v`` ``[1, S, H, D]``.

    Args:
        stock: ``stock(q, k, v) -> [S, H*D]`` for any number of heads.
        budget: seconds after which nothing new is started.

    Returns:
        ``{"rows", "heads", "head_dim", "slice_heads", "seconds", "candidates": {name: {...}}}``; a candidate has ``refused`` (why) or
        ``slice_ms``, ``error``, ``equal_to_stock`` (bytes, on the slice) and, when it got that far, ``ms`` at the full shape.
    """
    began = time.monotonic()
    deadline = began + budget
    call = Call.of(q, k, v)
    part = min(SLICE_HEADS, call.heads)
    few = tuple(t[:, :, :part] for t in (q, k, v))
    runs: dict[str, Callable] = {"stock": stock}
    result: dict[str, dict] = {}
    log.info("H3 attention: measuring backends at %d rows x %d heads x %d (at most %.0f s)", call.rows, call.heads, call.head_dim, budget)
    for backend in candidates:
        verdict = guard(backend, call, env)
        reason = verdict.refusal
        if reason is None:
            reason = small_run(backend, q.device, q.dtype, call.head_dim)
        if reason is None:
            runs[backend.name] = lambda a, b, c, backend=backend, copies=verdict.copies: backend.launch(a, b, c, copies)
        else:
            result[backend.name] = {"refused": reason}

    reference = None
    for name, run in runs.items():
        entry, reason = {}, None
        if time.monotonic() > deadline:
            reason = f"not measured: {budget:.0f} s were used up"
        else:
            try:
                run(*few)
                out, entry["slice_ms"] = _median_ms(lambda run=run: run(*few), q.device, deadline)
                entry["error"] = relative_error(*few, out)
                if name == "stock":
                    reference = out
                entry["equal_to_stock"] = reference is not None and same_bytes(out, reference)
                del out
            except Exception as problem:  # out of memory, or a third-party kernel; leave the except before the next one
                reason = f"{type(problem).__name__}: {problem}"
            if reason is None and not acceptable(entry["error"]):
                reason = f"off by {entry['error']:.1%} from exact attention"
        result[name] = {"refused": reason} if reason else entry
    del reference

    timed = {name: entry for name, entry in result.items() if "slice_ms" in entry}
    best = min((entry["slice_ms"] for name, entry in timed.items() if name != "stock"), default=0.0)
    close = [n for n, e in sorted(timed.items(), key=lambda i: i[1]["slice_ms"]) if n != "stock" and e["slice_ms"] <= CLOSE * best]
    for name in [n for n in ("stock", *close[:FINALISTS]) if n in timed]:
        expected = timed[name]["slice_ms"] / 1e3 * call.heads / part * 2
        if time.monotonic() + expected > deadline:
            log.info("H3 attention: %s not timed at the full shape (%.0f s would not be enough)", name, budget)
            continue
        reason = None
        try:
            runs[name](q, k, v)
            _, timed[name]["ms"] = _median_ms(lambda name=name: runs[name](q, k, v), q.device, deadline)
        except Exception as problem:
            reason = f"at the full shape: {type(problem).__name__}: {problem}"
        if reason:
            result[name] = {"refused": reason}
    record = {
        "rows": call.rows, "heads": call.heads, "head_dim": call.head_dim, "slice_heads": part,
        "seconds": round(time.monotonic() - began, 2), "candidates": result,
    }  # fmt: skip
    for line in table(record):
        log.info("H3 attention:   %s", line)
    return record


def ranking(record: dict) -> list[str]:
    """Names that may run, fastest first. Stock leads unless it is beaten by more than 2 %.

    A candidate timed at the slice only counts with the ratio that the others showed between slice and full shape.
    """
    able = {name: entry for name, entry in record["candidates"].items() if "slice_ms" in entry}
    ratios = [entry["ms"] / entry["slice_ms"] for entry in able.values() if "ms" in entry]
    ratio = statistics.median(ratios) if ratios else record["heads"] / record["slice_heads"]
    ms = {name: entry.get("ms", entry["slice_ms"] * ratio) for name, entry in able.items()}
    order = sorted(ms, key=ms.get)
    if "stock" in ms and ms[order[0]] > TIE * ms["stock"]:
        order.remove("stock")
        order.insert(0, "stock")
    return order


def table(record: dict) -> list[str]:
    """One line per candidate: time, error and equality, or why it was refused."""
    lines = []
    for name in ranking(record):
        entry = record["candidates"][name]
        full = f"{entry['ms']:9.2f} ms" if "ms" in entry else " " * 12
        part = f"{entry['slice_ms']:8.2f} ms at {record['slice_heads']} of {record['heads']} heads"
        same = ", byte-equal to stock" if entry["equal_to_stock"] and name != "stock" else ""
        lines.append(f"{name:<16}{full}{part}, relative error {entry['error']:.2e}{same}")
    lines += [f"{name:<16}{entry['refused']}" for name, entry in record["candidates"].items() if "refused" in entry]
    return lines

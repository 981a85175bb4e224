"""Byte-for-byte comparison with the stock chain, before first use, where the op is going to run.

A verdict belongs to a case (op, backend, device, dtypes, widths) and to an environment (GPU, driver, torch, cuDNN, the packages that
kernels come from, this pack's sources, the host's sources); it is remembered on disk, so a case costs a few milliseconds once per
environment. A difference switches that case off for the process and is said once, loudly. Nothing here knows a host: the two sides of a
comparison are given as functions.
"""

import functools
import logging
import math
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from .. import cache, nvrtc

log = logging.getLogger("h3_vortex")
KIND, VERSION = "verdicts", 1
SAMPLE_ROWS = 371  # neither a multiple of 16 nor of a tile: the padded paths are taken
TIMED_ROWS = 4096
# Distributions that the compared kernels of either side come from, or are compiled by.
PACKAGES = (
    "comfy-kitchen", "triton", "triton-windows", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
    "sageattention", "flash-attn", "flash-attn-3",
)
PAYLOADS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Verdict:
    """``equal``: the bytes agree. ``note`` says how it is known. ``ms``: (stock, ours) on :data:`TIMED_ROWS` rows, when measured."""

    equal: bool
    note: str
    ms: tuple[float, float] | None = None


_lock = threading.RLock()
_verdicts: dict[tuple[str, str], Verdict] = {}  # by environment and case: two hosts compare one op with chains of their own
_loaded: set[str] = set()


def device_name(device: torch.device) -> str:
    """The model of a device rather than its number: two equal GPUs share a verdict."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def environment(device: torch.device, host_digest: str) -> str:
    """File name of the verdicts that hold here."""
    parts = [device_name(device), torch.__version__, str(torch.version.cuda), *map(cache.version, PACKAGES), cache.sources(), host_digest]
    if device.type == "cuda":
        parts += [str(torch.cuda.get_device_capability(device)), nvrtc.driver_version(), str(torch.backends.cudnn.version())]
    return cache.digest(*parts)[:32] + ".json"


def _load(file: str) -> None:
    if file not in _loaded:
        _loaded.add(file)
        for case, data in (cache.read_json(KIND, file, VERSION) or {}).items():
            verdict = _remembered(data)
            if verdict is None:
                continue  # not written by this code: the case is found anew
            if _verdicts.setdefault((file, case), verdict) is verdict and not verdict.equal:
                _shout(case, verdict)


def _remembered(data) -> Verdict | None:
    """The verdict that :func:`settle` stored as ``data``; None for anything else."""
    if not isinstance(data, dict) or not isinstance(data.get("equal"), bool) or not isinstance(data.get("note"), str):
        return None
    ms = data.get("ms")
    timed = isinstance(ms, list) and len(ms) == 2 and all(type(value) in (int, float) for value in ms)
    return Verdict(data["equal"], data["note"] + " (remembered)", tuple(ms) if timed else None)


def _build_failure(error: Exception) -> bool:
    """Is this what a kernel that does not compile, launch or find memory raises? Triton's compiler has errors of its own, and calls a
    C compiler, which may be missing or fail."""
    return isinstance(error, (RuntimeError, OSError, subprocess.SubprocessError)) or type(error).__module__.split(".")[0] == "triton"


def _shout(case: str, verdict: Verdict) -> None:
    log.error("H3 Vortex: %s switched off, stock runs instead: %s", case, verdict.note)


def known(case: str, file: str) -> Verdict | None:
    """The verdict on ``case`` in this process or on disk; None when it has to be found."""
    with _lock:
        _load(file)
        return _verdicts.get((file, case))


def settle(
    case: str, file: str, compare: Callable[[], tuple[list, list]], time: Callable[[], tuple[float, float]] | None = None
) -> Verdict:
    """Run both sides, compare, remember, and return the verdict.

    Args:
        case: see :func:`.ops.case`.
        file: :func:`environment`.
        compare: returns the tensors of our side and of the stock side, in the same order.
        time: returns milliseconds (stock, ours); only asked when the bytes agree.
    """
    with _lock:
        present = known(case, file)
        if present is not None and (time is None or present.ms is not None or not present.equal):
            return present
        failure = None
        try:
            note = difference(*compare())
        except Exception as error:  # the comparison owns every tensor it touched
            if not _build_failure(error):
                raise
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        if failure is not None:
            verdict = Verdict(False, f"could not be run: {failure}")
        elif note is not None:
            verdict = Verdict(False, note)
        else:
            verdict = Verdict(True, f"equal to stock on {SAMPLE_ROWS} rows", time() if time is not None else None)
        _verdicts[file, case] = verdict
        if not verdict.equal:
            _shout(case, verdict)
        if failure is None:
            stored = cache.read_json(KIND, file, VERSION) or {}
            stored[case] = asdict(verdict)
            cache.write_json(KIND, file, VERSION, stored)
        return verdict


def difference(ours: list, stock: list) -> str | None:
    """None when the two lists hold the same bytes (a NaN on both sides counts as the same), else the first difference in words."""
    for index, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"result {index} is {mine.dtype} {list(mine.shape)}, stock gives {theirs.dtype} {list(theirs.shape)}"
        a, b = (t.detach().contiguous().reshape(-1) for t in (mine, theirs))
        if mine.dtype in PAYLOADS:  # which NaN it is carries nothing
            numbers = ~(a.isnan() & b.isnan())
            a, b = a[numbers], b[numbers]
        a, b = a.view(torch.uint8), b.view(torch.uint8)
        if not torch.equal(a, b):
            return f"result {index} differs from stock in {int((a != b).sum())} of {a.numel()} bytes"
    return None


def summary() -> dict[str, dict]:
    """``{case: {"equal", "note", "ms"}}`` of every verdict known to this process; where two hosts' verdicts differ, the one against it."""
    # a copy in place of the lock: that one is held while a case is compiled and compared, and a server's event loop asks here
    known_here = sorted(_verdicts.copy().items(), key=lambda entry: (entry[0][1], not entry[1].equal))
    return {case: asdict(verdict) for (_, case), verdict in known_here}


def timings() -> dict[str, dict]:
    """``{op: {"rows", "stock_ms", "kernel_ms"}}`` for the ops that were timed."""
    timed = {case.split(" ")[0]: verdict.ms for (_, case), verdict in _verdicts.copy().items() if verdict.ms is not None}
    return {op: {"rows": TIMED_ROWS, "stock_ms": round(ms[0], 4), "kernel_ms": round(ms[1], 4)} for op, ms in sorted(timed.items())}


# -- data ----------------------------------------------------------------------------------------------------------------------------

ZERO_ROWS, POISON_ROWS = 4, 4


def activations(rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int, poison: bool) -> torch.Tensor:
    """``[rows, width]`` like H3's residual stream, with the rows that break a careless kernel.

    Normal rows (std 1.6), heavy tails, outlier channels, row scales from 2^-30 to 2^10, small integers (rounding ties), rows of +0 and -0;
    with ``poison`` also rows of NaN, infinities and random bits (not for quantisers whose scale spans the tensor: one such row makes
    every byte of both sides meaningless).
    """
    if rows > SAMPLE_ROWS:  # made once, repeated on the device
        return activations(SAMPLE_ROWS, width, dtype, device, seed, poison)[torch.arange(rows, device=device) % SAMPLE_ROWS]
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * 1.6
    eighth = max(rows // 8, 1)
    x[eighth : 2 * eighth] *= torch.exp(torch.randn(rows, width, generator=generator))[eighth : 2 * eighth]
    x[2 * eighth : 3 * eighth, :: max(width // 8, 1)] *= 300
    x[3 * eighth : 4 * eighth] *= torch.exp2(torch.randint(-30, 11, (rows, 1), generator=generator).float())[3 * eighth : 4 * eighth]
    x[4 * eighth : 5 * eighth] = torch.randint(-8, 9, (rows, width), generator=generator).float()[4 * eighth : 5 * eighth]
    x[5 * eighth : 5 * eighth + ZERO_ROWS] = 0.0
    x[5 * eighth + ZERO_ROWS // 2 : 5 * eighth + ZERO_ROWS] = -0.0
    x = x.to(dtype)
    if poison:
        rows_of_bits = x[-POISON_ROWS:]
        bits = torch.randint(0, 256, (*rows_of_bits.shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        rows_of_bits.copy_(bits.view(dtype).squeeze(-1))
        x[-POISON_ROWS - 1, 0], x[-POISON_ROWS - 2, 1], x[-POISON_ROWS - 2, 3] = math.nan, math.inf, -math.inf
    return x.to(device)


def segments(rows: int, table_rows: int, seed: int) -> list[tuple[int, int, int]]:
    """A few runs of modulation rows over ``rows`` tokens, with an empty one, one of a single token and odd lengths."""
    generator = torch.Generator("cpu").manual_seed(seed)
    cuts = sorted({0, rows, min(1, rows), rows // 3, rows // 2 + 1 if rows > 2 else rows})
    picks = torch.randint(0, table_rows, (len(cuts),), generator=generator).tolist()
    runs = [(a, b, picks[i]) for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))]
    return [*runs[:1], (runs[0][1], runs[0][1], 0), *runs[1:]]

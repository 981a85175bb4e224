"""What every benchmark shares: clocks, alternation, ceilings, hashes and the result file.

On CUDA, times are CUDA-event times. On a CPU they are wall-clock times, good for testing the harness and nothing else; the
result then says ``"speed_valid": false``.
"""

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from ._pack import ROOT
from .machine import environment

SCHEMA = ROOT / "benchmarks" / "result.schema.json"
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA_VERSION = 1
PATHS = ("--out", "--comfyui")
_START = time.monotonic()


def log(*words):
    """Print with the seconds since the program started, at once (a killed run must still show how far it came)."""
    print(f"[{time.monotonic() - _START:6.1f}s]", *words, flush=True)


def elapsed():
    """Seconds since the program started."""
    return time.monotonic() - _START


# ---------------------------------------------------------------------------------------------------------- measuring
@dataclass(frozen=True)
class Sample:
    """One timed call. ms: device time. host_ms: time until the call returned. *_bytes: 0 on a CPU.

    ``resident_bytes`` was allocated before the call; ``peak_bytes`` is the most that the call added to it.
    """

    ms: float
    host_ms: float
    resident_bytes: int
    peak_bytes: int


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def measure(call, device):
    """Run ``call()`` once; returns (its result, :class:`Sample`)."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        value = call()
        ms = (time.perf_counter() - start) * 1e3
        return value, Sample(ms, ms, 0, 0)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    resident = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    begin.record()
    value = call()
    end.record()
    host_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize(device)
    return value, Sample(begin.elapsed_time(end), host_ms, resident, torch.cuda.max_memory_allocated(device) - resident)


def repeat(call, device, reps=10, warmup=3):
    """Milliseconds of ``reps`` calls after ``warmup`` untimed ones, for short kernels: one synchronisation at the end."""
    for _ in range(warmup):
        call()
    if torch.device(device).type != "cuda":
        return [measure(call, device)[1].ms for _ in range(reps)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    torch.cuda.synchronize(device)
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) for begin, end in events]


def alternate(cases, reps, device, observe):
    """Time the cases in turn, ``reps`` rounds, the order reversed in every second round.

    Args:
        cases: ``{name: factory}``; ``factory()`` is a context manager that yields the callable to time. What it does on
            the way in and out (loading a model, setting a backend) is not timed.
        reps: rounds.
        observe: ``observe(name, round, value)`` gets each result; nothing else keeps it alive.

    Returns:
        ``{name: [Sample, ...]}``.
    """
    samples = {name: [] for name in cases}
    for rep in range(reps):
        for name in list(cases) if rep % 2 == 0 else list(reversed(cases)):
            with cases[name]() as call:
                value, sample = measure(call, device)
            samples[name].append(sample)
            observe(name, rep, value)
            del value
    return samples


def summary(values):
    """``{"median", "min", "max", "n", "values"}`` of a non-empty list of numbers."""
    if not values:
        raise ValueError("summary of no values: the case was never run")
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "values": [round(value, 4) for value in values],
    }


def sha256(tensors):
    """SHA-256 (hex) over the dtype, shape and bytes of each tensor, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differing(a, b):
    """How many elements of two tensors differ in their bytes (equal NaNs are equal). Raises ValueError on unlike tensors."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare {tuple(a.shape)} {a.dtype} with {tuple(b.shape)} {b.dtype}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(bits) != b.contiguous().view(bits)).sum())


# ----------------------------------------------------------------------------------------------------------- ceilings
def _rate(work, call, device, reps=10):
    """``work`` per second of the median call, in units of 1e12."""
    return work / statistics.median(repeat(call, device, reps)) / 1e9


def _copy_rate(length, device):
    source = torch.empty(length, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return _rate(2 * length, lambda: target.copy_(source), device)


def _row_rates(rows, hidden, device):
    # Several buffers, so that a small shape is read from memory and not from the cache.
    inputs = [torch.randn(rows, hidden, device=device, dtype=torch.bfloat16) for _ in range(4)]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    turn = iter(range(1 << 30))

    def copy():
        at = next(turn)
        outputs[at % 4].copy_(inputs[(3 * at + 1) % 4])

    def add():
        at = next(turn)
        torch.add(inputs[at % 4], inputs[(at + 1) % 4], out=outputs[at % 4])

    size = rows * hidden * 2
    return _rate(2 * size, copy, device, 20), _rate(3 * size, add, device, 20)


def _matmul_rate(side, device):
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return _rate(2 * side**3, lambda: torch.mm(a, b), device)


def ceilings(device, rows, hidden):
    """Copy bandwidth and matmul rate of this machine, now: what the other figures of a run are held against.

    Returns TB/s (read plus written) of a 4 GiB copy and of copies between ``[rows, hidden]`` BF16 tensors, TB/s of a
    three-operand add, and TFLOP/s of an 8192^3 BF16 matrix product on random data. A CPU gets small stand-ins.
    """
    length, side = (1 << 32, 8192) if torch.device(device).type == "cuda" else (1 << 22, 256)
    copy_rows, add_rows = _row_rates(rows, hidden, device)
    return {
        "copy_bytes": length,
        "copy_TBs": _copy_rate(length, device),
        "rows": rows,
        "hidden": hidden,
        "copy_rows_TBs": copy_rows,
        "add_rows_TBs": add_rows,
        "matmul_side": side,
        "matmul_bf16_TFLOPs": _matmul_rate(side, device),
    }


# ------------------------------------------------------------------------------------------------------------- results
def without_folders(argv):
    """The arguments of a run with file names in place of paths: a result tells nothing about the disk it was made on."""
    words = []
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, path = word.partition("=")
        if before in PATHS:
            word = Path(word).name
        elif name in PATHS and equals:
            word = f"{name}={Path(path).name}"
        words.append(word)
    return words


def start_result(kind, device, argv, comfyui=None):
    """A result without rows: who, where, when, how; says so when it can hold no speeds. Fill ``rows`` inside :func:`guarded`."""
    cuda = torch.device(device).type == "cuda"
    if not cuda:
        log("harness check on a CPU: no speeds")
    return {
        "schema": SCHEMA_VERSION,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "run.py", "bench", kind, *without_folders(argv)],
        "clock": "cuda events" if cuda else "wall",
        "speed_valid": cuda,
        "environment": environment(device, comfyui),
        "ceilings": None,
        "power": None,
        "rows": [],
    }


def validate(result):
    """Check ``result`` against ``result.schema.json``; raises jsonschema.ValidationError. Needs the jsonschema package."""
    import jsonschema

    jsonschema.validate(result, json.loads(SCHEMA.read_text(encoding="utf-8")))


def plain(value):
    """``value`` as strict JSON holds it: NaN and infinities become their names, unknown objects their text."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def write_result(result, path):
    """Write ``result`` as JSON, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def schema_fault(result):
    """What in ``result`` does not follow the schema, in one line; None when all does, or without the jsonschema package."""
    if importlib.util.find_spec("jsonschema") is None:
        return None
    import jsonschema

    try:
        validate(plain(result))
    except jsonschema.ValidationError as error:
        return f"{'.'.join(map(str, error.absolute_path)) or 'the result'}: {error.message.splitlines()[0][:300]}"
    return None


def writable(text):
    """``text`` as a path that a result can be written to; makes its folder. Raises ValueError."""
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"{text} is a folder: name a file, such as {path / 'result.json'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{text} cannot be written ({error.strerror}): name a file in a folder that you can write to") from None
    return path


def out_path(argument, kind, device):
    """Where a result goes: ``argument``, or ``benchmarks/results/KIND-DEVICE-DATE.json``. Raises SystemExit when that is not writable."""
    if argument:
        return Path(argument)
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    try:
        return writable(RESULTS / f"{kind}-{''.join(c if c.isalnum() else '-' for c in name).lower()}-{stamp}.json")
    except ValueError as error:
        sys.exit(f"{error}, with --out")


@contextlib.contextmanager
def guarded(result, path):
    """Write ``result`` also when the block raises or is interrupted: minutes of measurements outlive one late failure.

    A result that does not fit the schema is a bug here and no reason to lose it: it is written, and one line says what is off. A run
    that failed before its first row leaves nothing where nobody asked for a file.
    """
    try:
        yield result
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if "error" not in result or result["rows"] or Path(path).parent != RESULTS:
            write_result(result, path)
            log("wrote", path)
            fault = schema_fault(result)
            if fault:
                log(f"the result does not follow {SCHEMA.name}; please report this: {fault}")


def nothing_measured(result):
    """Whether every row of ``result`` was skipped; says so."""
    empty = all("skipped" in row for row in result["rows"])
    if empty:
        print("NOTHING WAS MEASURED: the rows say why")
    return empty


def pick_device(name):
    """The device called ``name``, or when that is None ``cuda`` where there is one, else ``cpu``. Raises ValueError."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: use cuda or cpu") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device {name!r} cannot be measured: use cuda or cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"{name}: this torch sees no CUDA device (use cpu for a harness check)")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"{name}: the last CUDA device here is cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)

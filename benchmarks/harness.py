"""What every benchmark shares: clocks, alternation, ceilings, hashes, the environment row and the result file.

On CUDA, times are CUDA-event times. On a CPU they are wall-clock times, good for testing the harness and nothing else; the
result then says ``"speed_valid": false``.
"""

import contextlib
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = Path(__file__).resolve().parent / "result.schema.json"
RESULTS = Path(__file__).resolve().parent / "results"
SCHEMA_VERSION = 1
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


# -------------------------------------------------------------------------------------------------------- environment
def _smi(fields, device):
    """nvidia-smi's values for ``fields`` on ``device`` as ``{field: text}``; {} where there is no nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    done = subprocess.run(
        [program, f"--id={_uuid(device)}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if done.returncode:
        return {"error": done.stdout.strip() or done.stderr.strip()}
    values = next(csv.reader(done.stdout.splitlines()))
    return dict(zip(fields, (value.strip() for value in values), strict=True))


def _uuid(device):
    identity = str(torch.cuda.get_device_properties(device).uuid)
    return identity if identity.startswith("GPU-") else f"GPU-{identity}"


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit():
    """(commit, whether the working tree differs from it) of the pack; ``H3_VORTEX_COMMIT`` where there is no git."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return os.environ.get("H3_VORTEX_COMMIT"), None
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return os.environ.get("H3_VORTEX_COMMIT"), None
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return head.stdout.strip(), bool(changed.stdout.strip())


def source_digest():
    """SHA-256 over the files that decide a result (kernels/, csrc/, h3/, benchmarks/*.py): names a copy without git."""
    digest = hashlib.sha256()
    for folder, pattern in (("kernels", "**/*.py"), ("csrc", "**/*"), ("h3", "**/*.py"), ("benchmarks", "*.py")):
        for path in sorted((ROOT / folder).glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def environment(device, comfyui=None):
    """The row that says where a result comes from. ``comfyui``: version of the core, as text."""
    device = torch.device(device)
    head, dirty = commit()
    row = {
        "device": device.type,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "comfy_kitchen": _version("comfy-kitchen"),
        "sageattention": _version("sageattention"),
        "comfyui": comfyui,
        "commit": head,
        "uncommitted_changes": dirty,
        "source_sha256": source_digest(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "allocator": torch.cuda.get_allocator_backend(),
        }
        smi = _smi(("driver_version", "power.limit", "power.default_limit", "clocks.max.sm", "persistence_mode"), device)
        row["driver"] = smi.get("driver_version")
        row["nvidia_smi"] = smi
    else:
        row["cpu_threads"] = torch.get_num_threads()
    return row


class PowerLog:
    """Samples power, clock and the power-cap flag with ``nvidia-smi`` while a ``with`` block runs; reads only.

    Puts its summary into ``result["power"]`` when the block ends: None without nvidia-smi or on a CPU, else means and
    extremes over the samples taken while the GPU was busy.
    """

    FIELDS = ("power.draw", "power.limit", "clocks.sm", "utilization.gpu", "temperature.gpu")
    # Drivers before 535 call the flag by its older name.
    FLAGS = ("clocks_event_reasons.sw_power_cap", "clocks_throttle_reasons.sw_power_cap")

    def __init__(self, device, result, period_ms=500):
        self.device, self.result, self.period = torch.device(device), result, period_ms
        self._process = self._file = None

    def __enter__(self):
        if self.device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return self
        flag = next((flag for flag in self.FLAGS if "error" not in _smi((flag,), self.device)), None)
        self._fields = self.FIELDS + ((flag,) if flag else ())
        self._file = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            ["nvidia-smi", f"--id={_uuid(self.device)}", f"--query-gpu={','.join(self._fields)}",
             "--format=csv,noheader,nounits", f"--loop-ms={self.period}"],
            stdout=self._file, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait(timeout=10)
        self._file.seek(0)
        self.result["power"] = self.summarise(self._file.read().splitlines())
        self._file.close()

    @staticmethod
    def summarise(lines):
        """``lines``: nvidia-smi CSV in the order power, limit, SM clock, utilisation, temperature[, power-cap flag]."""
        busy = []
        for row in csv.reader(lines):
            try:
                numbers = [float(value) for value in row[:5]]
            except ValueError:  # the terminated process may leave half a line, a virtual GPU "[N/A]"
                continue
            if len(numbers) == 5 and numbers[3] >= 50:
                busy.append((numbers, row[5].strip().lower() == "active" if len(row) > 5 else None))
        if not busy:
            return {"busy_samples": 0}
        column = list(zip(*(numbers for numbers, _ in busy), strict=True))
        flags = [flag for _, flag in busy if flag is not None]
        return {
            "busy_samples": len(busy),
            "power_W": {"mean": statistics.fmean(column[0]), "max": max(column[0]), "limit": column[1][-1]},
            "sm_clock_MHz": {"mean": statistics.fmean(column[2]), "min": min(column[2]), "max": max(column[2])},
            "temperature_C": max(column[4]),
            "power_capped_share": statistics.fmean(flags) if flags else None,
        }


# ------------------------------------------------------------------------------------------------------------- results
def without_folders(argv):
    """The arguments of a run with file names in place of paths: a result tells nothing about the disk it was made on."""
    return [Path(word).name if before == "--out" else word for before, word in zip(["", *argv], argv, strict=False)]


def start_result(kind, device, argv, comfyui=None):
    """A result without rows: who, where, when, how. Fill ``rows`` and hand it to :func:`write_result`."""
    cuda = torch.device(device).type == "cuda"
    return {
        "schema": SCHEMA_VERSION,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks", kind, *without_folders(argv)],
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
    """Write ``result`` as JSON, whole or not at all; then check it against the schema where jsonschema is installed.

    Written first: a result that does not fit the schema is a bug here, and no reason to lose the measurements.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = plain(result)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
    if importlib.util.find_spec("jsonschema") is not None:
        validate(result)


def out_path(argument, kind, device):
    """Where a result goes: ``argument``, or ``benchmarks/results/KIND-DEVICE-DATE.json``."""
    if argument:
        return Path(argument)
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return RESULTS / f"{kind}-{''.join(c if c.isalnum() else '-' for c in name).lower()}-{stamp}.json"


@contextlib.contextmanager
def guarded(result, path):
    """Write ``result`` also when the block raises or is interrupted: minutes of measurements outlive one late failure."""
    try:
        yield result
    except BaseException as error:
        result["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_result(result, path)
        log("wrote", path)


def pick_device(name):
    """``cuda`` when ``name`` is None and there is one, else ``cpu``; raises SystemExit when CUDA is asked for in vain."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device {name}: this torch sees no CUDA device (use --device cpu for a harness check)")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)

"""The machine a result comes from: the environment row, and power, clock and power cap while it was measured. Sets nothing."""

import csv
import hashlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import tempfile

import torch

from ._pack import ROOT


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

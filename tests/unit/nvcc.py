"""Compiles the CUDA sources for every GPU generation they name, where nvcc is installed; nothing is run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent.parent / "csrc"
ARCHITECTURES = ("80", "86", "89", "90a", "100a", "120a", "121a")
NVCC = os.environ.get("NVCC") or shutil.which("nvcc")


def check(name, tmp_path, **defines):
    """Asserts that ``csrc/<name>.cu`` compiles with ``defines``, without warnings, for all of :data:`ARCHITECTURES`."""
    if not NVCC:
        pytest.skip("nvcc is not installed (set NVCC to its path)")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command = [NVCC, "-fatbin", *targets, "-diag-suppress", "177", *(f"-D{k}={int(v)}" for k, v in defines.items()),
               "-o", str(tmp_path / f"{name}.fatbin"), str(CSRC / f"{name}.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr

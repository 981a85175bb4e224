"""Triton kernels of the pack on the CPU, through Triton's interpreter made faithful where bytes depend on it.

The interpreter converts fp32 to bf16 by truncation and loses bf16 subnormals; hardware rounds to nearest even and keeps them. Only tests
use this: a kernel module is loaded under a name of its own, so that the real one stays compiled in a process that also has a GPU.
"""

import contextlib
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

OPS = Path(__file__).resolve().parent.parent / "kernels" / "triton_ops"


def _to_bf16(values):
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
    return floats.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def _from_bf16(values):
    return np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << np.uint32(16)


@contextlib.contextmanager
def interpreted(stem):
    """``kernels/triton_ops/<stem>.py``, its kernels interpreted. Skips the test where triton is not installed."""
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bf16(values)
        if source == tl.bfloat16 and target == tl.float32:
            return _from_bf16(values)
        return original(values, source, target, rounding)

    interpreter._convert_float = convert
    try:
        spec = importlib.util.spec_from_file_location(f"h3_vortex_interpreted_{stem}", OPS / f"{stem}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with np.errstate(all="ignore"):  # infinities and NaN are part of the data
            yield module
    finally:
        interpreter._convert_float = original
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

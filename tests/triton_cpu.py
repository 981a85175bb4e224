"""Triton kernels of the pack on the CPU, through Triton's interpreter made faithful where bytes depend on it.

The interpreter converts fp32 to bf16 by truncation and loses bf16 subnormals; hardware rounds to nearest even and keeps them. Inline
assembly, which it lacks, is there for the instructions our kernels use; ``rcp.approx`` is modelled as correctly rounded (the instruction
may be 1 ulp off). Only tests use this: the kernel modules are loaded in a package of their own, so that the real ones stay compiled in a
process that also has a GPU.
"""

import contextlib
import importlib
import os
import sys
import types
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


def _flush(values):
    """fp32 subnormals to zero of the same sign."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return np.where((bits & 0x7F800000) == 0, bits & np.uint32(0x80000000), bits).view(np.float32)


_INSTRUCTIONS = {
    "mul.ftz.f32": lambda a, b: _flush(_flush(a) * _flush(b)),
    "rcp.approx.ftz.f32": lambda a: _flush(np.float32(1.0) / _flush(a)),
}


def _inline_asm(interpreter):
    def create_inline_asm(self, asm, constraints, values, types, is_pure, pack):
        dtype = types[0] if isinstance(types, (list, tuple)) else types
        result = _INSTRUCTIONS[asm.split()[0]](*(value.data for value in values))
        handle = interpreter.TensorHandle(result, dtype.scalar)
        return type("Result", (), {"get_result": lambda self, index: handle})()

    return create_inline_asm


@contextlib.contextmanager
def interpreted(stem):
    """``kernels/triton_ops/<stem>.py``, its kernels interpreted. Skips the test where triton is not installed."""
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import language as tl
    from triton.runtime import JITFunction, interpreter

    original, original_asm = interpreter._convert_float, interpreter.InterpreterBuilder.create_inline_asm

    def convert(values, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bf16(values)
        if source == tl.bfloat16 and target == tl.float32:
            return _from_bf16(values)
        return original(values, source, target, rounding)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_inline_asm = _inline_asm(interpreter)
    # Triton's own device functions (tl.max) are compiled ones if something imported triton before
    library = {name: value for name, value in vars(tl).items() if isinstance(value, JITFunction)}
    for name, value in library.items():
        setattr(tl, name, interpreter.InterpretedFunction(value.fn))
    package = sys.modules.setdefault("h3_vortex_interpreted", types.ModuleType("h3_vortex_interpreted"))
    package.__path__ = [str(OPS)]  # a kernel module's relative imports find the interpreted siblings
    try:
        module = importlib.import_module(f"h3_vortex_interpreted.{stem}")
        with np.errstate(all="ignore"):  # infinities and NaN are part of the data
            yield module
    finally:
        for name, value in library.items():
            setattr(tl, name, value)
        interpreter._convert_float = original
        interpreter.InterpreterBuilder.create_inline_asm = original_asm
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

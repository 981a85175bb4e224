"""Triton's CPU interpreter made faithful to the hardware where the kernels' bytes depend on it. Import before anything of Triton's.

Triton 3.9's interpreter truncates fp32 -> bf16 instead of rounding, and has no inline assembly. Both are replaced here: conversions by
torch's, the assembly instructions that the kernels use by numpy. ``rcp.approx`` is modelled as correctly rounded; the instruction
may be 1 ulp off.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_convert_float = interpreter._convert_float


def _to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 bit patterns (any 32-bit dtype) to bf16 bit patterns, round to nearest even."""
    floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
    return floats.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def _convert(values, source, target, rounding):
    if source == tl.float32 and target == tl.bfloat16:
        return _to_bf16(values)
    return _convert_float(values, source, target, rounding)


def flush(values) -> np.ndarray:
    """fp32 subnormals to zero of the same sign."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    return np.where((bits & 0x7F800000) == 0, bits & np.uint32(0x80000000), bits).view(np.float32)


_INSTRUCTIONS = {
    "mul.ftz.f32": lambda a, b: flush(flush(a) * flush(b)),
    "rcp.approx.ftz.f32": lambda a: flush(np.float32(1.0) / flush(a)),
}


class _Result:
    def __init__(self, handle):
        self.handle = handle

    def get_result(self, index):
        return self.handle


def _inline_asm(self, asm, constraints, values, types, is_pure, pack):
    instruction = asm.split()[0]
    if instruction not in _INSTRUCTIONS:
        raise NotImplementedError(f"teach tests/unit/_triton_interpreter.py the instruction {instruction}")
    dtype = types[0] if isinstance(types, (list, tuple)) else types
    with np.errstate(all="ignore"):
        result = _INSTRUCTIONS[instruction](*(value.data for value in values))
    return _Result(interpreter.TensorHandle(result, dtype.scalar))


interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_inline_asm = _inline_asm

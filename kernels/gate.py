"""Gated residual: ``x = x + other * gate`` in place, one gate row per token.

Stock runs ``comfy.ldm.minimax.model._mod_gate``: per segment a cast of the gate row and one ``addcmul_``. On CUDA, ``addcmul_`` on bf16
computes in fp32 with the product fused into the sum (one fp32 rounding) and rounds once to bf16. comfy-kitchen has
``rms_gated_residual`` (newer versions, HIP and eager only), which normalises ``other`` first: another formula.
"""

import torch

from . import nvrtc, rules, segments
from .dispatch import Op, Planned


def reference(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The contract: stock's ``addcmul_`` with the gate row rounded to ``x.dtype`` first (any dtype, any device)."""
    for start, stop, row in segments.runs(rows):
        x[start:stop].addcmul_(other[start:stop], gate[row].to(x.dtype))
    return x


def check(x, other, gate, rows) -> None:
    segments.check_modulation("gate", "x", x, rows, gate=gate)
    segments.check_like("gate", "x", x, other=other)


OP = Op("gate", reference, ("x", "other", "gate", "rows"), check)


TOKENS_PER_BLOCK = 16


def _plan_cuda(x, other, gate, rows):
    tokens, width = x.shape
    if not tokens:
        return lambda x, other, gate, rows: x
    threads = rules.column_threads(width // 8)
    kernel = nvrtc.kernel("gate", "PPPPqqqii", x.get_device(), N=width, THREADS=threads, TABLE_F32=gate.dtype == torch.float32)
    grid = -(-width // (8 * threads)) * -(-tokens // TOKENS_PER_BLOCK)
    strides = x.stride(0), other.stride(0), gate.stride(0), tokens, TOKENS_PER_BLOCK

    def launch(x, other, gate, rows):
        kernel.launch(grid, threads, x.data_ptr(), other.data_ptr(), gate.data_ptr(), rows.data_ptr(), *strides)
        return x

    return launch


def _run_triton(x, other, gate, rows):
    from .triton_ops import gate as kernels

    return kernels.gate(x, other, gate, rows)


_DTYPES = {"x": rules.BF16, "other": rules.BF16, "gate": rules.TABLE}
OP.add_backend("cuda", Planned(_plan_cuda), rules.cuda(_DTYPES, rules.width("x"), rules.vector_rows("x", "other", "gate")))
OP.add_backend("triton", _run_triton, rules.triton(_DTYPES, rules.dense("x", "other", "gate")))


def gate(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x + other * gate[row]`` in place, with the bytes of ``addcmul_``.

    Args:
        x: ``[S, H]``, unit stride in the last dimension; overwritten.
        other: ``[S, H]``, dtype of ``x``; only read.
        gate: ``[R, H]`` AdaLN table in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).

    Returns:
        ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        _registered(x, other, gate, rows)
        return x
    return OP(x, other, gate, rows)


@torch.library.custom_op("h3_vortex::gate", mutates_args={"x"})
def _registered(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> None:
    OP(x, other, gate, rows)


@_registered.register_fake
def _fake(x, other, gate, rows):
    return None

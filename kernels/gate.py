"""Gated residual: ``x = x + other * gate`` in place, one gate row per token.

Stock runs ``comfy.ldm.minimax.model._mod_gate``: per segment a cast of the gate row and one ``addcmul_``. On CUDA, ``addcmul_`` on bf16
computes in fp32 with the product fused into the sum (one fp32 rounding) and rounds once to bf16. comfy-kitchen has
``rms_gated_residual`` (newer versions, HIP and eager only), which normalises ``other`` first: another formula.

Variant ``rounding="twice"`` (an op of its own, ``gate_twice``) is what diffusers' blocks run, ``x + gate * other``: the product rounds
to bf16 before it is added.
"""

import functools

import torch

from . import nvrtc, rules, segments
from .dispatch import Op, Planned, Variants


def reference(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The contract: stock's ``addcmul_`` with the gate row rounded to ``x.dtype`` first (any dtype, any device)."""
    for start, stop, row in segments.runs(rows):
        x[start:stop].addcmul_(other[start:stop], gate[row].to(x.dtype))
    return x


def reference_twice(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The contract of ``rounding="twice"``: a product and a sum that both round to ``x.dtype`` (any dtype, any device)."""
    for start, stop, row in segments.runs(rows):
        x[start:stop].add_(gate[row].to(x.dtype) * other[start:stop])
    return x


def check(x, other, gate, rows) -> None:
    segments.check_modulation("gate", "x", x, rows, gate=gate)
    segments.check_like("gate", "x", x, other=other)


OP = Op("gate", reference, ("x", "other", "gate", "rows"), check)
OPS = Variants("rounding", once=OP, twice=Op("gate_twice", reference_twice, OP.signature, check))


TOKENS_PER_BLOCK = 16


def _plan_cuda(x, other, gate, rows, twice):
    tokens, width = x.shape
    if not tokens:
        return lambda x, other, gate, rows: x
    threads = rules.column_threads(width // 8)
    kernel = nvrtc.kernel(
        "gate", "PPPPqqqii", x.get_device(), N=width, THREADS=threads, TABLE_F32=gate.dtype == torch.float32, GATE_TWICE=twice
    )
    grid = -(-width // (8 * threads)) * -(-tokens // TOKENS_PER_BLOCK)
    strides = x.stride(0), other.stride(0), gate.stride(0), tokens, TOKENS_PER_BLOCK

    def launch(x, other, gate, rows):
        kernel.launch(grid, threads, x.data_ptr(), other.data_ptr(), gate.data_ptr(), rows.data_ptr(), *strides)
        return x

    return launch


def _run_triton(x, other, gate, rows, twice):
    from .triton_ops import gate as kernels

    return kernels.gate(x, other, gate, rows, twice)


_DTYPES = {"x": rules.BF16, "other": rules.BF16, "gate": rules.TABLE}
for _rounding, _op in OPS.items():
    _twice = {"twice": _rounding == "twice"}
    _op.add_backend(
        "cuda", Planned(functools.partial(_plan_cuda, **_twice)),
        rules.cuda(_DTYPES, rules.width("x"), rules.vector_rows("x", "other", "gate")),
    )
    _op.add_backend("triton", functools.partial(_run_triton, **_twice), rules.triton(_DTYPES, rules.dense("x", "other", "gate")))


def gate(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, rounding: str = "once") -> torch.Tensor:
    """``x + other * gate[row]`` in place, with the bytes of ``addcmul_``.

    Args:
        x: ``[S, H]``, unit stride in the last dimension; overwritten.
        other: ``[S, H]``, dtype of ``x``; only read.
        gate: ``[R, H]`` AdaLN table in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        rounding: ``once`` (ComfyUI: the product is fused into the sum) or ``twice`` (diffusers: it rounds first).

    Returns:
        ``x``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        _registered(x, other, gate, rows, rounding)
        return x
    return OPS[rounding](x, other, gate, rows)


@torch.library.custom_op("h3_vortex::gate", mutates_args={"x"})
def _registered(x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, rows: torch.Tensor, rounding: str = "once") -> None:
    OPS[rounding](x, other, gate, rows)


@_registered.register_fake
def _fake(x, other, gate, rows, rounding="once"):
    return None

"""RMSNorm and modulation straight to the rotated INT8 pair, with or without the gated residual in front.

What stock runs for QKV and FC1 of an INT8-ConvRot checkpoint: ``_mod_gate`` (for the gate form), ``F.rms_norm``, ``_mod_scale_shift``, then
kitchen's CUDA quantiser inside ``int8_linear``: :func:`stock` and :func:`stock_gated`. Newer kitchens have ``int8_linear_rms_modulated``,
whose CUDA backend does not implement it.

The contract is :mod:`.norm_modulate` (or :mod:`.gate_norm_modulate`) followed by :mod:`.quantize_rotate_int8`, every rounding kept: the
modulated row is rounded to bf16 before the rotation, but never written to memory. On CUDA the reference's norm is torch's own kernel,
so there its bytes are stock's; on other devices torch's norm rounds differently and the reference follows that.

The CUDA backend multiplies by 1/16 once instead of by 0.5 in each of the four stages. The bytes are the same unless a sum of up to 256
modulated values overflows, that is for absolute values above 2**119 (a normed row is bounded by sqrt(H) times the largest weight).
Fewer roundings cannot show: scaling by powers of two is exact, and values small enough to turn subnormal are quantised to 0 either way,
because no scale is below 1e-30.
"""

import functools

import torch

from . import gate_norm_modulate, norm_modulate, nvrtc, quantize_rotate_int8, segments
from .dispatch import Constraints, Op, Rule
from .quantize_rotate_int8 import check_columns, vector_rows

_MAX_COLUMNS = 8192  # two warps hold the row in registers
_TABLE_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


def reference(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract: :func:`.norm_modulate.reference`, then :func:`.quantize_rotate_int8.reference`."""
    return quantize_rotate_int8.reference(norm_modulate.reference(x, weight, shift, scale, rows, eps))


def reference_gated(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract: :func:`.gate_norm_modulate.reference` (``x`` in place), then :func:`.quantize_rotate_int8.reference`."""
    return quantize_rotate_int8.reference(gate_norm_modulate.reference(x, other, gate, weight, shift, scale, rows, eps))


def stock(x, weight, shift, scale, mod_segments, eps) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's own calls for ``[(start, stop, row), ...]``, the quantiser being kitchen's. For verification, tests and benchmarks."""
    h = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    for start, stop, row in mod_segments:
        h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return quantize_rotate_int8.stock(h)


def stock_gated(x, other, gate, weight, shift, scale, mod_segments, eps) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`stock` after stock's gated residual, which updates ``x`` in place."""
    for start, stop, row in mod_segments:
        x[start:stop].addcmul_(other[start:stop], gate[row].to(x.dtype))
    return stock(x, weight, shift, scale, mod_segments, eps)


def check(x, weight, shift, scale, rows, eps) -> None:
    _check("norm_modulate_int8", x, weight, rows, shift=shift, scale=scale)


def check_gated(x, other, gate, weight, shift, scale, rows, eps) -> None:
    _check("gate_norm_modulate_int8", x, weight, rows, gate=gate, shift=shift, scale=scale)
    segments.check_like("gate_norm_modulate_int8", "x", x, other=other)


def _check(op, x, weight, rows, **tables) -> None:
    segments.check_modulation(op, "x", x, rows, **tables)
    segments.check_weight(op, "x", x, weight)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise ValueError(f"{op}: x and weight must be bfloat16, got {x.dtype} and {weight.dtype}")
    check_columns(op, x.shape[1])


OP = Op("norm_modulate_int8", reference, ("x", "weight", "shift", "scale", "rows", "eps"), check)
OP_GATED = Op(
    "gate_norm_modulate_int8", reference_gated, ("x", "other", "gate", "weight", "shift", "scale", "rows", "eps"), check_gated)


def defines(columns: int, gated: bool) -> str:
    """The lines in front of ``csrc/norm_modulate_int8.cu``."""
    return f"#define K {columns}\n#define MIN_BLOCKS 8\n#define MULS 0\n#define GATE {int(gated)}\n#define TABLE_F32 0\n"


@functools.cache
def _kernel(device: torch.device, columns: int, gated: bool) -> nvrtc.Kernel:
    text = defines(columns, gated) + nvrtc.source("norm_modulate_int8")
    return nvrtc.Kernel(text, "norm_modulate_int8", "PPPPPPPPPqqqqqf", device)


def _launch(x, other, gate, weight, shift, scale, rows, eps):
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    row_scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if x.shape[0]:
        # A rounded copy of a table (a few rows) costs less than reading fp32 for every token; kept alive until the launch is queued.
        shift, scale, gate = (t if t is None or t.dtype == torch.bfloat16 else t.to(torch.bfloat16) for t in (shift, scale, gate))
        gated = gate is not None
        _kernel(x.device, x.shape[1], gated).launch(
            x.shape[0], 64, x.data_ptr(), other.data_ptr() if gated else 0, gate.data_ptr() if gated else 0, weight.data_ptr(),
            shift.data_ptr(), scale.data_ptr(), rows.data_ptr(), q.data_ptr(), row_scale.data_ptr(),
            x.stride(0), other.stride(0) if gated else 0, gate.stride(0) if gated else 0, shift.stride(0), scale.stride(0), eps)
    return q, row_scale


def _run_cuda(x, weight, shift, scale, rows, eps):
    return _launch(x, None, None, weight, shift, scale, rows, eps)


def _run_cuda_gated(x, other, gate, weight, shift, scale, rows, eps):
    return _launch(x, other, gate, weight, shift, scale, rows, eps)


def _add_cuda(op: Op, run, activations: tuple[str, ...], tables: tuple[str, ...]) -> None:
    bf16 = frozenset({torch.bfloat16})
    op.add_backend("cuda", run, Constraints(
        devices=frozenset({"cuda"}),
        dtypes={**dict.fromkeys(activations, bf16), "weight": bf16, **dict.fromkeys(tables, _TABLE_DTYPES)},
        min_capability=(8, 0),
        available=nvrtc.unavailable_reason,
        rules=(
            Rule(f"H of at most {_MAX_COLUMNS}", lambda a: a["x"].shape[1] <= _MAX_COLUMNS),
            Rule("weight contiguous at a multiple of 16 bytes", lambda a: a["weight"].is_contiguous() and a["weight"].data_ptr() % 16 == 0),
            Rule("rows contiguous", lambda a: a["rows"].is_contiguous()),
            *vector_rows(*activations, *tables),
        ),
    ))


_add_cuda(OP, _run_cuda, ("x",), ("shift", "scale"))
_add_cuda(OP_GATED, _run_cuda_gated, ("x", "other"), ("gate", "shift", "scale"))


def norm_modulate_int8(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8-ConvRot input of QKV in the first block: ``quantize_rotate(rms_norm(x) * (1 + scale[row]) + shift[row])``.

    Feed the pair to :func:`.int8_seam.linear`.

    Args:
        x: bf16 ``[S, H]``, H a multiple of 256, unit stride in the last dimension; only read.
        weight: bf16 ``[H]`` RMSNorm weight.
        shift, scale: ``[R, H]`` AdaLN tables, bf16, fp16 or fp32. Rounded to bf16 first, as stock does: pass bf16 tables (one rounding
            per model call instead of one per site) where the host keeps fp32 ones.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        eps: added to the mean square.

    Returns:
        ``(q, scale)``: int8 ``[S, H]`` and fp32 ``[S, 1]``, new and contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(x, weight, shift, scale, rows, eps)
    return OP(x, weight, shift, scale, rows, eps)


def gate_norm_modulate_int8(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8-ConvRot input of FC1 and of the next block's QKV: ``x += other * gate[row]`` in place, then :func:`norm_modulate_int8` of it.

    Args:
        x: bf16 ``[S, H]``, H a multiple of 256, unit stride in the last dimension; overwritten with the gated residual.
        other: like ``x``; only read.
        gate, shift, scale: ``[R, H]`` AdaLN tables, as for :func:`norm_modulate_int8`.
        weight, rows, eps: as for :func:`norm_modulate_int8`.

    Returns:
        ``(q, scale)``: int8 ``[S, H]`` and fp32 ``[S, 1]``, new and contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered_gated(x, other, gate, weight, shift, scale, rows, eps)
    return OP_GATED(x, other, gate, weight, shift, scale, rows, eps)


@torch.library.custom_op("h3_vortex::norm_modulate_int8", mutates_args=())
def _registered(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return OP(x, weight, shift, scale, rows, eps)


@torch.library.custom_op("h3_vortex::gate_norm_modulate_int8", mutates_args={"x"})
def _registered_gated(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return OP_GATED(x, other, gate, weight, shift, scale, rows, eps)


@_registered.register_fake
def _fake(x, weight, shift, scale, rows, eps):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@_registered_gated.register_fake
def _fake_gated(x, other, gate, weight, shift, scale, rows, eps):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)

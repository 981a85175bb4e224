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

import torch

from . import gate_norm_modulate, norm_modulate, nvrtc, quantize_rotate_int8, rules, segments
from . import stock as stock_ops
from .dispatch import Op, Planned
from .quantize_rotate_int8 import check_columns


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
    """Stock's own calls for segments ``[(start, stop, row), ...]``, the quantiser being kitchen's. For verification, tests, benchmarks."""
    return quantize_rotate_int8.stock(stock_ops.norm_modulate(x, weight, shift, scale, mod_segments, eps))


def stock_gated(x, other, gate, weight, shift, scale, mod_segments, eps) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`stock` after stock's gated residual, which updates ``x`` in place."""
    return quantize_rotate_int8.stock(stock_ops.gate_norm_modulate(x, other, gate, weight, shift, scale, mod_segments, eps))


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


def defines(columns: int, gated: bool) -> dict[str, int]:
    """Switches of ``csrc/norm_modulate_int8.cu``, which gives a row to two warps."""
    return {"K": columns, "MIN_BLOCKS": 8, "MULS": 0, "GATE": int(gated), "TABLE_F32": 0}


def _plan(x, gated):
    rows, columns = x.shape
    device, x_stride = x.device, x.stride(0)
    kernel = nvrtc.kernel("norm_modulate_int8", "PPPPPPPPPqqqqqf", x.get_device(), **defines(columns, gated))

    def launch(x, other, gate, weight, shift, scale, row_map, eps):
        q, row_scale = quantize_rotate_int8.empty_pair(rows, columns, device)
        if rows:
            shift, scale, gate = map(segments.rounded, (shift, scale, gate))  # live until the launch is queued
            kernel.launch(
                rows, 64, x.data_ptr(), other.data_ptr(), gate.data_ptr(), weight.data_ptr(), shift.data_ptr(), scale.data_ptr(),
                row_map.data_ptr(), q.data_ptr(), row_scale.data_ptr(),
                x_stride, other.stride(0), gate.stride(0), shift.stride(0), scale.stride(0), eps,
            )
        return q, row_scale

    return launch


def _plan_cuda(x, weight, shift, scale, rows, eps):
    launch = _plan(x, gated=False)
    # x and weight also stand in for the residual branch and the gate, which are not read
    return lambda x, weight, shift, scale, rows, eps: launch(x, x, weight, weight, shift, scale, rows, eps)


def _plan_cuda_gated(x, other, gate, weight, shift, scale, rows, eps):
    return _plan(x, gated=True)


_DTYPES = {"x": rules.BF16, "weight": rules.BF16, "shift": rules.TABLE, "scale": rules.TABLE}
_NORM = (rules.TORCH_RMS_NORM, rules.width("x", rules.MAX_NORM_WIDTH))
OP.add_backend(
    "cuda", Planned(_plan_cuda), rules.cuda(_DTYPES, *_NORM, rules.vector_rows("x", "weight", "shift", "scale")))
OP_GATED.add_backend(
    "cuda", Planned(_plan_cuda_gated),
    rules.cuda(
        {**_DTYPES, "other": rules.BF16, "gate": rules.TABLE}, *_NORM,
        rules.vector_rows("x", "other", "weight", "gate", "shift", "scale"),
    ),
)


def norm_modulate_int8(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8-ConvRot input of QKV in the first block: ``quantize_rotate(rms_norm(x) * (1 + scale[row]) + shift[row])``.

    Feed the pair to :func:`.int8_seam.linear`.

    Args:
        x: bf16 ``[S, H]``, H a multiple of 256, unit stride in the last dimension; only read.
        weight: bf16 ``[H]`` RMSNorm weight.
        shift, scale: ``[R, H]`` AdaLN tables, bf16 or fp32 (others run on the ``eager`` backend). Rounded to bf16 first, as stock does:
            a host that keeps fp32 tables saves the rounding per site by passing bf16 ones.
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

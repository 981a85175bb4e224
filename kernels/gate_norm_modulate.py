"""Gated residual, then RMSNorm and modulation of the result, in one pass.

``x = gate(x, other)`` in place and ``h = norm_modulate(x)``: what lies between attention and MLP of a block, and between the MLP of one
block and the attention of the next. Stock runs ``_mod_gate``, ``F.rms_norm`` and ``_mod_scale_shift`` one after the other; the norm reads
the gated residual after its rounding to bf16, and so does this op. comfy-kitchen has no such fusion for CUDA.

Variant ``rounding="twice"`` (an op of its own, ``gate_norm_modulate_twice``) starts with that variant of the gate, as diffusers' blocks do.
"""

import functools

import torch

from . import gate as gate_op
from . import norm_modulate, rules, segments
from .dispatch import Op, Planned, Variants


def reference(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float,
) -> torch.Tensor:
    """The contract: :func:`.gate.reference` on ``x``, then :func:`.norm_modulate.reference` of it (any dtype, any device)."""
    return norm_modulate.reference(gate_op.reference(x, other, gate, rows), weight, shift, scale, rows, eps)


def reference_twice(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float,
) -> torch.Tensor:
    """The contract of ``rounding="twice"``: :func:`.gate.reference_twice`, then :func:`.norm_modulate.reference`."""
    return norm_modulate.reference(gate_op.reference_twice(x, other, gate, rows), weight, shift, scale, rows, eps)


def check(x, other, gate, weight, shift, scale, rows, eps) -> None:
    segments.check_modulation("gate_norm_modulate", "x", x, rows, gate=gate, shift=shift, scale=scale)
    segments.check_like("gate_norm_modulate", "x", x, other=other)
    segments.check_weight("gate_norm_modulate", "x", x, weight)


OP = Op("gate_norm_modulate", reference, ("x", "other", "gate", "weight", "shift", "scale", "rows", "eps"), check)
OPS = Variants("rounding", once=OP, twice=Op("gate_norm_modulate_twice", reference_twice, OP.signature, check))


def _plan_cuda(x, other, gate, weight, shift, scale, rows, eps, twice):
    tokens, width = x.shape
    compiled = norm_modulate.kernel(width, True, x.get_device(), twice)
    x_stride, other_stride = x.stride(0), other.stride(0)

    def launch(x, other, gate, weight, shift, scale, rows, eps):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tokens:
            gate, shift, scale = map(segments.rounded, (gate, shift, scale))  # live until the launch is queued
            compiled.launch(
                tokens, 64, x.data_ptr(), other.data_ptr(), gate.data_ptr(), weight.data_ptr(), scale.data_ptr(), shift.data_ptr(),
                out.data_ptr(), rows.data_ptr(), x_stride, other_stride, gate.stride(0), scale.stride(0), shift.stride(0), eps,
            )
        return out

    return launch


_CONSTRAINTS = rules.cuda(
    {
        "x": rules.BF16, "other": rules.BF16, "weight": rules.BF16,
        "gate": rules.TABLE, "shift": rules.TABLE, "scale": rules.TABLE,
    },
    rules.TORCH_RMS_NORM,
    rules.width("x", rules.MAX_NORM_WIDTH),
    rules.vector_rows("x", "other", "weight", "gate", "shift", "scale"),
)
for _rounding, _op in OPS.items():
    _op.add_backend("cuda", Planned(functools.partial(_plan_cuda, twice=_rounding == "twice")), _CONSTRAINTS)


def gate_norm_modulate(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, rounding: str = "once",
) -> torch.Tensor:
    """``x += other * gate[row]`` in place; returns ``rms_norm(x) * (1 + scale[row]) + shift[row]``, rounded where stock rounds.

    Args:
        x: ``[S, H]``, unit stride in the last dimension; overwritten with the gated residual.
        other: ``[S, H]``, dtype of ``x``; only read.
        gate, shift, scale: ``[R, H]`` AdaLN tables in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        weight: ``[H]`` RMSNorm weight.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        eps: added to the mean square.
        rounding: of the gate, ``once`` (ComfyUI) or ``twice`` (diffusers), see :func:`.gate.gate`.

    Returns:
        new ``[S, H]`` in the dtype of ``F.rms_norm``'s result, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(x, other, gate, weight, shift, scale, rows, eps, rounding)
    return OPS[rounding](x, other, gate, weight, shift, scale, rows, eps)


@torch.library.custom_op("h3_vortex::gate_norm_modulate", mutates_args={"x"})
def _registered(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, rounding: str = "once",
) -> torch.Tensor:
    return OPS[rounding](x, other, gate, weight, shift, scale, rows, eps)


@_registered.register_fake
def _fake(x, other, gate, weight, shift, scale, rows, eps, rounding="once"):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))

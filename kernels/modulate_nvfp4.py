"""AdaLN modulation straight into NVFP4, alone, after RMSNorm, or after the gated residual and RMSNorm.

``modulate_nvfp4`` is ``nvfp4_quantize(modulate(h))``, ``norm_modulate_nvfp4`` starts from the un-normed stream, and
``gate_norm_modulate_nvfp4`` first adds the gated branch to the stream in place: the three inputs a block's QKV and FC1 layers can have. The
modulated tensor is never written. Stock runs (norm,) ``mul_``, ``add_``, ``abs``, ``amax``, a division and ``quantize_nvfp4``. With a dynamic
tensor scale two passes remain: one for the amax (keeping one fp32 ``rstd`` per row in the norm forms), one that recomputes and packs;
with a given ``tensor_scale`` one pass. comfy-kitchen has no such fusion for NVFP4.
"""

import torch

from . import gate_norm_modulate, modulate, norm_modulate, nvfp4_quantize, segments
from .dispatch import Op
from .nvfp4_quantize import Triple, fake_triple, keep_scale, own_scale, stock_contract

# ---- modulate_nvfp4 -------------------------------------------------------------------------------------------------------------


def reference(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str
) -> Triple:
    """The contract: :func:`.modulate.reference` on a copy of ``h``, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(modulate.reference(h.clone(), shift, scale, rows), tensor_scale, contract)


def check(h, shift, scale, rows, tensor_scale, contract) -> None:
    segments.check_modulation("modulate_nvfp4", "h", h, rows, shift=shift, scale=scale)
    nvfp4_quantize.check_scale("modulate_nvfp4", tensor_scale, h.device)


OP = Op("modulate_nvfp4", reference, ("h", "shift", "scale", "rows", "tensor_scale", "contract"), check)


def modulate_nvfp4(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor,
    tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """``h * (1 + scale[row]) + shift[row]``, rounded as stock rounds it, quantised as stock quantises it. ``h`` is not written.

    Args:
        h: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; only read.
        shift, scale: ``[R, H]`` AdaLN tables in any floating dtype; rounded to ``h.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        tensor_scale: one fp32 value on the device of ``h`` (a layer's ``input_scale``), or None: computed here.
        contract: as in :func:`.nvfp4_quantize.nvfp4_quantize`.

    Returns:
        ``(qdata uint8 [M16, H16/2], tensor_scale fp32 [], block_scale float8_e4m3fn)`` as :func:`.nvfp4_quantize.nvfp4_quantize`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_registered(h, shift, scale, rows, tensor_scale, contract), tensor_scale)
    return OP(h, shift, scale, rows, tensor_scale, contract or stock_contract(h.device, h.dtype))


@torch.library.custom_op("h3_vortex::modulate_nvfp4", mutates_args=())
def _registered(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor,
    tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return own_scale(OP(h, shift, scale, rows, tensor_scale, contract or stock_contract(h.device, h.dtype)), tensor_scale)


@_registered.register_fake
def _fake(h, shift, scale, rows, tensor_scale, contract):
    return fake_triple(h, h.shape[1], tensor_scale)


# ---- norm_modulate_nvfp4 --------------------------------------------------------------------------------------------------------


def norm_reference(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None, contract: str,
) -> Triple:
    """The contract: :func:`.norm_modulate.reference`, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(norm_modulate.reference(x, weight, shift, scale, rows, eps), tensor_scale, contract)


def norm_check(x, weight, shift, scale, rows, eps, tensor_scale, contract) -> None:
    segments.check_modulation("norm_modulate_nvfp4", "x", x, rows, shift=shift, scale=scale)
    segments.check_weight("norm_modulate_nvfp4", "x", x, weight)
    nvfp4_quantize.check_scale("norm_modulate_nvfp4", tensor_scale, x.device)


NORM_OP = Op(
    "norm_modulate_nvfp4", norm_reference, ("x", "weight", "shift", "scale", "rows", "eps", "tensor_scale", "contract"), norm_check
)


def norm_modulate_nvfp4(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """:func:`modulate_nvfp4` of ``rms_norm(x, weight, eps)``, in torch's reduction order. ``x`` is not written.

    Args:
        x: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; only read.
        weight: ``[H]`` RMSNorm weight; ``eps`` is added to the mean square.
        shift, scale, rows, tensor_scale, contract: as in :func:`modulate_nvfp4`.

    Returns:
        the triple of :func:`modulate_nvfp4`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_norm_registered(x, weight, shift, scale, rows, eps, tensor_scale, contract), tensor_scale)
    return NORM_OP(x, weight, shift, scale, rows, eps, tensor_scale, contract or stock_contract(x.device, x.dtype))


@torch.library.custom_op("h3_vortex::norm_modulate_nvfp4", mutates_args=())
def _norm_registered(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    contract = contract or stock_contract(x.device, x.dtype)
    return own_scale(NORM_OP(x, weight, shift, scale, rows, eps, tensor_scale, contract), tensor_scale)


@_norm_registered.register_fake
def _norm_fake(x, weight, shift, scale, rows, eps, tensor_scale, contract):
    return fake_triple(x, x.shape[1], tensor_scale)


# ---- gate_norm_modulate_nvfp4 ---------------------------------------------------------------------------------------------------


def gate_norm_reference(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None, contract: str,
) -> Triple:
    """The contract: :func:`.gate_norm_modulate.reference` (``x`` in place), then :func:`.nvfp4_quantize.reference` of its result."""
    h = gate_norm_modulate.reference(x, other, gate, weight, shift, scale, rows, eps)
    return nvfp4_quantize.reference(h, tensor_scale, contract)


def gate_norm_check(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract) -> None:
    segments.check_modulation("gate_norm_modulate_nvfp4", "x", x, rows, gate=gate, shift=shift, scale=scale)
    segments.check_like("gate_norm_modulate_nvfp4", "x", x, other=other)
    segments.check_weight("gate_norm_modulate_nvfp4", "x", x, weight)
    nvfp4_quantize.check_scale("gate_norm_modulate_nvfp4", tensor_scale, x.device)


GATE_NORM_OP = Op(
    "gate_norm_modulate_nvfp4", gate_norm_reference,
    ("x", "other", "gate", "weight", "shift", "scale", "rows", "eps", "tensor_scale", "contract"), gate_norm_check,
)


def gate_norm_modulate_nvfp4(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """``x += other * gate[row]`` in place (as ``addcmul_`` rounds it); returns :func:`norm_modulate_nvfp4` of the new ``x``.

    Args:
        x: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; overwritten.
        other: ``[S, H]``, dtype of ``x``; only read.
        gate: ``[R, H]`` AdaLN table in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        weight, shift, scale, rows, eps, tensor_scale, contract: as in :func:`norm_modulate_nvfp4`.

    Returns:
        the triple of :func:`modulate_nvfp4`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        triple = _gate_norm_registered(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)
        return keep_scale(triple, tensor_scale)
    contract = contract or stock_contract(x.device, x.dtype)
    return GATE_NORM_OP(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)


@torch.library.custom_op("h3_vortex::gate_norm_modulate_nvfp4", mutates_args={"x"})
def _gate_norm_registered(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    contract = contract or stock_contract(x.device, x.dtype)
    triple = GATE_NORM_OP(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)
    return own_scale(triple, tensor_scale)


@_gate_norm_registered.register_fake
def _gate_norm_fake(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract):
    return fake_triple(x, x.shape[1], tensor_scale)

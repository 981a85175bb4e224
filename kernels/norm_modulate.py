"""RMSNorm and modulation in one pass: ``h = modulate(rms_norm(x, weight, eps), shift, scale)``.

Stock runs ``F.rms_norm`` (torch's fused CUDA kernel) and then ``_mod_scale_shift``. The reduction order that gives torch's bytes is
written down in ``csrc/norm_modulate.cu``. comfy-kitchen's ``int8_linear_rms_modulated`` (newer versions) has no CUDA kernel, and its
``adaln`` is a layer norm.
"""

import torch

from . import modulate, segments
from .dispatch import Op


def reference(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> torch.Tensor:
    """The contract: torch's own ``F.rms_norm``, then :func:`.modulate.reference` (any dtype, any device)."""
    return modulate.reference(torch.nn.functional.rms_norm(x, weight.shape, weight, eps), shift, scale, rows)


def check(x, weight, shift, scale, rows, eps) -> None:
    segments.check_modulation("norm_modulate", "x", x, rows, shift=shift, scale=scale)
    segments.check_weight("norm_modulate", "x", x, weight)


OP = Op("norm_modulate", reference, ("x", "weight", "shift", "scale", "rows", "eps"), check)


def norm_modulate(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> torch.Tensor:
    """``rms_norm(x) * (1 + scale[row]) + shift[row]``, rounded where stock rounds.

    Args:
        x: ``[S, H]``, unit stride in the last dimension; only read.
        weight: ``[H]`` RMSNorm weight.
        shift, scale: ``[R, H]`` AdaLN tables in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        eps: added to the mean square.

    Returns:
        new ``[S, H]`` in the dtype of ``F.rms_norm``'s result, contiguous.

    Raises:
        ValueError: shapes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(x, weight, shift, scale, rows, eps)
    return OP(x, weight, shift, scale, rows, eps)


@torch.library.custom_op("h3_vortex::norm_modulate", mutates_args=())
def _registered(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> torch.Tensor:
    return OP(x, weight, shift, scale, rows, eps)


@_registered.register_fake
def _fake(x, weight, shift, scale, rows, eps):
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))

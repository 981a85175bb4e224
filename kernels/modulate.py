"""AdaLN modulation of the normed stream: ``h = bf16(bf16(h * bf16(1 + scale)) + shift)``, one table row per token.

Stock runs ``comfy.ldm.minimax.model._mod_scale_shift``: per segment a cast of each table row, ``1.0 + scale``, ``mul_`` and ``add_``, two
passes over memory in the broadcast form of torch's elementwise kernel. comfy-kitchen's ``adaln`` normalises as well, takes one
row per batch item and rounds once at the end, so neither its shape nor its bytes fit; this op is one pass with stock's roundings.
"""

import torch

from . import segments
from .dispatch import Op


def reference(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The contract: stock's own three statements, each rounding to ``h.dtype`` (any dtype, any device)."""
    for start, stop, row in segments.runs(rows):
        h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return h


def check(h, shift, scale, rows) -> None:
    segments.check_modulation("modulate", "h", h, rows, shift=shift, scale=scale)


OP = Op("modulate", reference, ("h", "shift", "scale", "rows"), check)


def modulate(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``h * (1 + scale[row]) + shift[row]`` in place, rounded after every step as stock does.

    Args:
        h: ``[S, H]``, unit stride in the last dimension; overwritten.
        shift, scale: ``[R, H]`` AdaLN tables in any floating dtype; rounded to ``h.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).

    Returns:
        ``h``.

    Raises:
        ValueError: shapes, devices or the row map's dtype do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        _registered(h, shift, scale, rows)
        return h
    return OP(h, shift, scale, rows)


@torch.library.custom_op("h3_vortex::modulate", mutates_args={"h"})
def _registered(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> None:
    OP(h, shift, scale, rows)


@_registered.register_fake
def _fake(h, shift, scale, rows):
    return None

"""AdaLN modulation of the normed stream: ``h = bf16(bf16(h * bf16(1 + scale)) + shift)``, one table row per token.

Stock runs ``comfy.ldm.minimax.model._mod_scale_shift``: per segment a cast of each table row, ``1.0 + scale``, ``mul_`` and ``add_``, two
passes over memory in the broadcast form of torch's elementwise kernel. comfy-kitchen's ``adaln`` normalises as well, takes one
row per batch item and rounds once at the end, so neither its shape nor its bytes fit; this op is one pass with stock's roundings.
"""

import torch

from . import nvrtc, rules, segments
from .dispatch import Op, Planned


def reference(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The contract: stock's own three statements, each rounding to ``h.dtype`` (any dtype, any device)."""
    for start, stop, row in segments.runs(rows):
        h[start:stop].mul_(1.0 + scale[row].to(h.dtype)).add_(shift[row].to(h.dtype))
    return h


def check(h, shift, scale, rows) -> None:
    segments.check_modulation("modulate", "h", h, rows, shift=shift, scale=scale)


OP = Op("modulate", reference, ("h", "shift", "scale", "rows"), check)


TOKENS_PER_BLOCK = 16


def _plan_cuda(h, shift, scale, rows):
    tokens, width = h.shape
    if not tokens:
        return lambda h, shift, scale, rows: h
    threads = rules.column_threads(width // 8)
    kernel = nvrtc.kernel(
        "modulate", "PPPPqqqii", h.get_device(), N=width, THREADS=threads, TABLE_F32=shift.dtype == torch.float32
    )
    grid = -(-width // (8 * threads)) * -(-tokens // TOKENS_PER_BLOCK)
    strides = h.stride(0), scale.stride(0), shift.stride(0), tokens, TOKENS_PER_BLOCK

    def launch(h, shift, scale, rows):
        kernel.launch(grid, threads, h.data_ptr(), scale.data_ptr(), shift.data_ptr(), rows.data_ptr(), *strides)
        return h

    return launch


def _run_triton(h, shift, scale, rows):
    from .triton_ops import modulate as kernels

    return kernels.modulate(h, shift, scale, rows)


_DTYPES = {"h": rules.BF16, "shift": rules.TABLE, "scale": rules.TABLE}
OP.add_backend(
    "cuda",
    Planned(_plan_cuda),
    rules.cuda(_DTYPES, rules.width("h"), rules.one_table_dtype("shift", "scale"), rules.vector_rows("h", "shift", "scale")),
)
OP.add_backend("triton", _run_triton, rules.triton(_DTYPES, rules.dense("h", "shift", "scale")))


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

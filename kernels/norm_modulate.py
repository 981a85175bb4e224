"""RMSNorm and modulation in one pass: ``h = modulate(rms_norm(x, weight, eps), shift, scale)``.

Stock runs ``F.rms_norm`` (torch's fused CUDA kernel) and then ``_mod_scale_shift``. The reduction order that gives torch's bytes is
written down in ``csrc/norm_modulate.cu``. comfy-kitchen's ``int8_linear_rms_modulated`` (newer versions) has no CUDA kernel, and its
``adaln`` is a layer norm.
"""

import torch

from . import modulate, nvrtc, rules, segments
from .dispatch import Op, Planned


def reference(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float
) -> torch.Tensor:
    """The contract: torch's own ``F.rms_norm``, then :func:`.modulate.reference` (any dtype, any device)."""
    return modulate.reference(torch.nn.functional.rms_norm(x, weight.shape, weight, eps), shift, scale, rows)


def check(x, weight, shift, scale, rows, eps) -> None:
    segments.check_modulation("norm_modulate", "x", x, rows, shift=shift, scale=scale)
    segments.check_weight("norm_modulate", "x", x, weight)


OP = Op("norm_modulate", reference, ("x", "weight", "shift", "scale", "rows", "eps"), check)


AHEAD = 3  # vectors of the residual branch loaded ahead of their use (gate form)


def kernel(width: int, gated: bool, index: int, twice: bool = False) -> nvrtc.Kernel:
    """``csrc/norm_modulate.cu`` for one width: one row per block of 64 threads.

    The occupancy asked for is what the registers allow: a thread holds its share of the row (4 per 16-byte vector), the loads ahead
    and about 36 others. More spills, less starves the memory system.
    """
    registers = 4 * -(-width // 512) + 36 + (20 if gated else 0)
    return nvrtc.kernel(
        "norm_modulate", "PPPPPPPPqqqqqf", index,
        N=width, GATE=gated, TABLE_F32=False, AHEAD=AHEAD, MIN_BLOCKS=min(16, 65536 // (64 * registers)),
        GATE_TWICE=twice,
    )


def _plan_cuda(x, weight, shift, scale, rows, eps):
    tokens, width = x.shape
    compiled = kernel(width, False, x.get_device())
    x_stride = x.stride(0)

    def launch(x, weight, shift, scale, rows, eps):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tokens:
            shift, scale = segments.rounded(shift), segments.rounded(scale)  # live until the launch is queued
            compiled.launch(
                tokens, 64, x.data_ptr(), 0, 0, weight.data_ptr(), scale.data_ptr(), shift.data_ptr(), out.data_ptr(),
                rows.data_ptr(), x_stride, 0, 0, scale.stride(0), shift.stride(0), eps,
            )
        return out

    return launch


OP.add_backend(
    "cuda",
    Planned(_plan_cuda),
    rules.cuda(
        {"x": rules.BF16, "weight": rules.BF16, "shift": rules.TABLE, "scale": rules.TABLE},
        rules.TORCH_RMS_NORM,
        rules.width("x", rules.MAX_NORM_WIDTH),
        rules.vector_rows("x", "weight", "shift", "scale"),
    ),
)


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

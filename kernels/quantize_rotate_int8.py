"""INT8-ConvRot input of a Linear: rotate groups of 256 columns, then quantise every row to INT8 with one fp32 scale.

What stock runs: ``comfy_kitchen.int8_linear`` on a bf16 input calls the CUDA kernel ``quantize_int8_rowwise_convrot64`` (:func:`stock`)
and feeds its INT8 GEMM. That kernel, not kitchen's eager path, is the contract: ``quantize_and_rotate_rowwise`` (kitchen's fallback,
and what its CPU backend does) rotates by a bf16 matrix product and gives other bytes. This op exists because kitchen's kernel runs at
0.15 to 0.27 of copy bandwidth.

The contract, step by step (fp32 throughout; a subnormal input or result of any addition or multiplication becomes a zero of its sign):

1. bf16 input to fp32. A group of 256 passes four radix-4 butterflies over strides 1, 4, 16, 64::

       y0 = ((x0 + x1) + x2) - x3      y1 = ((x0 + x1) - x2) + x3
       y2 = ((x0 - x1) + x2) + x3      y3 = ((-x0 + x1) + x2) + x3      each times 0.5

2. ``amax`` is the largest absolute value of the *unrounded* rotated row, NaN ignored;
   ``scale = max(min(amax, 3.38953139e38) * fp32(1 / 127), 1e-30)``.
3. ``q = clamp(round_half_even(bf16(bf16(rotated) / bf16(scale))), -128, 127)``; NaN gives -128.

Kitchen divides by the hardware's approximate reciprocal. That cannot show: both operands have 8 significant bits, so a quotient lies
at least 2**-17 (relative) away from every rounding boundary of bf16, and the approximation errs by less than 2**-22.

Reference and stock agree for any bit pattern of the input, and so does the CUDA backend (it multiplies by 0.5 in every stage, as
kitchen does, so that huge values overflow in the same places).
"""

import torch

from . import int8_seam, nvrtc, rules
from .dispatch import Op, Planned
from .int8_seam import GROUP, MAX_COLUMNS

_SMALLEST_NORMAL = 2.0**-126
_LARGEST_BF16 = 3.3895313892515355e38
_REFERENCE_ROWS = 2048  # bounds the fp32 temporaries of the reference


def flush(values: torch.Tensor) -> torch.Tensor:
    """fp32 with subnormals replaced by zeros of their sign: the ``.ftz`` of PTX."""
    return torch.where(values.abs() < _SMALLEST_NORMAL, values * 0.0, values)


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Step 1 of the contract on fp32 ``[S, K]``, K a multiple of 256."""
    x = flush(values).reshape(-1, GROUP)
    for stride in (1, 4, 16, 64):
        x0, x1, x2, x3 = x.view(-1, GROUP // (4 * stride), 4, stride).unbind(2)
        a, b = flush(x0 + x1), flush(x0 - x1)
        y0 = flush(flush(a + x2) - x3)
        y1 = flush(flush(a - x2) + x3)
        y2 = flush(flush(b + x2) + x3)
        y3 = flush(flush(x2 - b) + x3)
        x = flush(torch.stack((y0, y1, y2, y3), 2) * 0.5).view(-1, GROUP)
    return x.view(values.shape)


def quantize(rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 2 and 3 of the contract on fp32 ``[S, K]``."""
    magnitude = rotated.abs()
    amax = torch.where(magnitude.isnan(), 0.0, magnitude).amax(dim=1, keepdim=True)
    inverse = torch.tensor(1.0 / 127.0, dtype=torch.float32, device=rotated.device)
    scale = flush(amax.clamp(max=_LARGEST_BF16) * inverse).clamp(min=1.0e-30)
    quotient = rotated.to(torch.bfloat16).float() / scale.to(torch.bfloat16).float()
    q = quotient.to(torch.bfloat16).float().round().clamp(-128.0, 127.0)
    return torch.where(q.isnan(), -128.0, q).to(torch.int8), scale


def quantize_rotated_chunks(rows: int, columns: int, device: torch.device, chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair for ``rows`` rows, a stretch at a time; ``chunk(start, stop)`` gives fp32 ``[stop - start, columns]`` before rotation."""
    q, scale = empty_pair(rows, columns, device)
    for start in range(0, rows, _REFERENCE_ROWS):
        stop = min(start + _REFERENCE_ROWS, rows)
        q[start:stop], scale[start:stop] = quantize(rotate(chunk(start, stop)))
    return q, scale


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract above, the same bytes on every device. Slow: it checks, production off CUDA takes the stock Linear."""
    return quantize_rotated_chunks(x.shape[0], x.shape[1], x.device, lambda start, stop: x[start:stop].float())


def stock(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's own call: kitchen's CUDA quantiser on contiguous bf16 ``[S, K]``. For verification, tests and benchmarks."""
    return int8_seam.quantize(x)


def check_columns(op: str, columns: int) -> None:
    """Raises ValueError unless kitchen's fused quantiser takes a row of ``columns``."""
    if columns % GROUP or not GROUP <= columns <= MAX_COLUMNS:
        raise ValueError(f"{op}: columns must be a multiple of {GROUP} from {GROUP} to {MAX_COLUMNS}, got {columns}")


def check(x) -> None:
    if x.dim() != 2 or x.dtype != torch.bfloat16:
        raise ValueError(f"quantize_rotate_int8: x must be bfloat16 [S, K], got {x.dtype} {list(x.shape)}")
    check_columns("quantize_rotate_int8", x.shape[1])


OP = Op("quantize_rotate_int8", reference, ("x",), check)


def defines(columns: int) -> dict[str, int]:
    """Switches of ``csrc/quantize_rotate_int8.cu``: a warp holds up to 14 groups of 256 as packed bf16 (56 registers per lane)."""
    warps = -(-columns // (14 * GROUP))
    return {"K": columns, "WARPS": warps, "MIN_BLOCKS": 16 // warps, "MULS": 1}


def empty_pair(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty((rows, columns), dtype=torch.int8, device=device), torch.empty((rows, 1), dtype=torch.float32, device=device)


def _plan_cuda(x):
    rows, columns = x.shape
    device, stride, switches = x.device, x.stride(0), defines(columns)
    kernel = nvrtc.kernel("quantize_rotate_int8", "PPPq", x.get_device(), **switches)
    threads = 32 * switches["WARPS"]

    def launch(x):
        q, scale = empty_pair(rows, columns, device)
        if rows:
            kernel.launch(rows, threads, x.data_ptr(), q.data_ptr(), scale.data_ptr(), stride)
        return q, scale

    return launch


OP.add_backend("cuda", Planned(_plan_cuda), rules.cuda({"x": rules.BF16}, rules.vector_rows("x")))


def quantize_rotate_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise the input of an INT8-ConvRot Linear (attention's ``out_proj``); feed the pair to :func:`.int8_seam.linear`.

    Args:
        x: bf16 ``[S, K]``, K a multiple of 256 up to 16384, unit stride in the last dimension; only read.

    Returns:
        ``(q, scale)``: int8 ``[S, K]`` and fp32 ``[S, 1]``, new and contiguous, the bytes of kitchen's CUDA quantiser. Rotated ``x`` is
        about ``q * scale``.

    Raises:
        ValueError: another dtype, rank or width.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(x)
    return OP(x)


@torch.library.custom_op("h3_vortex::quantize_rotate_int8", mutates_args=())
def _registered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return OP(x)


@_registered.register_fake
def _fake(x):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)

"""SwiGLU of the fused FC1 output, rotated and quantised for the INT8-ConvRot FC2, without writing the activation.

What stock runs: ``comfy.ops.linear_input_act(fc2, gate_up, "swiglu")`` calls ``comfy_kitchen.int8_linear(input_act="swiglu")``, whose
CUDA quantiser applies the activation on the way in (:func:`stock`). Kitchen has the fusion; this op exists because that kernel runs at
0.27 of copy bandwidth.

The contract is that of :mod:`.quantize_rotate_int8` with, in front of the rotation, in fp32 and with the hardware's approximations of
exponential and division (kitchen is built with ``--use_fast_math``)::

    f = (gate / (1 + exp(-gate))) * up

``f`` is **not** rounded to bf16 before the rotation, unlike eager ``silu(gate) * up``. The two approximations (``ex2.approx`` and
``div.approx``, each within 2 units in the last place of fp32) belong to the chip and cannot be written in torch, so the reference
replaces them by the rounded exact values: its scales may differ by a few units in the last place and single codes by one step. Where
both approximations are exact (``gate`` 0, above 18, below -88) its bytes are stock's. The CUDA backend uses the chip's instructions,
as kitchen does, and has stock's bytes for any bit pattern.
"""

import torch

from . import int8_seam, nvrtc, rules
from .dispatch import Op, Planned
from .int8_seam import GROUP
from .quantize_rotate_int8 import check_columns, empty_pair, flush, quantize_rotated_chunks

COMPILE_OPTIONS = ("--use_fast_math",)  # as kitchen: expf and division become the chip's approximations
_LOG2_E = 1.4426950216293335  # the fp32 nearest to log2(e); __expf(x) is ex2.approx(x * log2(e))
_RECIPROCAL_LIMIT = 2.0**126  # div.approx gives 0 for a finite numerator over anything larger


def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``(gate / (1 + exp(-gate))) * up`` on fp32 tensors in the order of the contract, with exact exponential and division."""
    gate, up = flush(gate), flush(up)
    log2_e = torch.tensor(_LOG2_E, dtype=torch.float32, device=gate.device)
    exponential = flush(torch.exp2(flush(-gate * log2_e).double()).float())
    denominator = 1.0 + exponential
    quotient = torch.where(denominator > _RECIPROCAL_LIMIT, gate * 0.0, flush(gate / denominator))
    return flush(quotient * up)


def reference(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract above; its bytes are kitchen's except where the two hardware approximations show."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2

    def chunk(start, stop):
        gate, up = gate_up[start:stop].float().chunk(2, dim=1)
        return activation(gate, up)

    return quantize_rotated_chunks(rows, columns, gate_up.device, chunk)


def stock(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stock's own call: kitchen's CUDA quantiser with the folded activation. For verification, tests and benchmarks."""
    return int8_seam.quantize(gate_up, "swiglu")


def check(gate_up) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype != torch.bfloat16:
        raise ValueError(f"swiglu_int8: gate_up must be bfloat16 [S, 2F], got {gate_up.dtype} {list(gate_up.shape)}")
    check_columns("swiglu_int8", gate_up.shape[1] // 2)


OP = Op("swiglu_int8", reference, ("gate_up",), check)


def defines(columns: int) -> dict[str, int]:
    """Switches of ``csrc/swiglu_int8.cu``: a warp holds up to 8 groups of 256 (32 registers per lane) beside the next gate and up."""
    warps = -(-columns // (8 * GROUP))
    return {"K": columns, "WARPS": warps, "MIN_BLOCKS": min(16, 28 // warps), "MULS": 1}


def _plan_cuda(gate_up):
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    device, stride, switches = gate_up.device, gate_up.stride(0), defines(columns)
    kernel = nvrtc.kernel("swiglu_int8", "PPPq", gate_up.get_device(), COMPILE_OPTIONS, **switches)
    threads = 32 * switches["WARPS"]

    def launch(gate_up):
        q, scale = empty_pair(rows, columns, device)
        if rows:
            kernel.launch(rows, threads, gate_up.data_ptr(), q.data_ptr(), scale.data_ptr(), stride)
        return q, scale

    return launch


OP.add_backend("cuda", Planned(_plan_cuda), rules.cuda({"gate_up": rules.BF16}, rules.vector_rows("gate_up")))


def swiglu_int8(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``silu(gate) * up``, rotated and quantised for an INT8-ConvRot FC2; feed the pair to :func:`.int8_seam.linear`.

    Args:
        gate_up: bf16 ``[S, 2F]``, the gate half first, F a multiple of 256 up to 16384, unit stride in the last dimension; only read.

    Returns:
        ``(q, scale)``: int8 ``[S, F]`` and fp32 ``[S, 1]``, new and contiguous, the bytes of kitchen's CUDA quantiser.

    Raises:
        ValueError: another dtype, rank or width.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(gate_up)
    return OP(gate_up)


@torch.library.custom_op("h3_vortex::swiglu_int8", mutates_args=())
def _registered(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return OP(gate_up)


@_registered.register_fake
def _fake(gate_up):
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty((rows, columns), dtype=torch.int8), gate_up.new_empty((rows, 1), dtype=torch.float32)

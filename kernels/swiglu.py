"""SwiGLU of the fused FC1 output: ``bf16(bf16(silu(gate)) * up)`` from ``[gate | up]``.

Stock (``comfy.ops.linear_input_act`` outside the INT8 path) runs ``silu(gate).mul_(up)`` on the two halves, two passes over memory.
comfy-kitchen folds ``swiglu`` into its INT8 quantiser only; for bf16 it has the same two torch calls.

Variant ``order="value_gate"`` (an op of its own, ``swiglu_value_gate``) takes ``[up | gate]``, the order of diffusers' feed-forward.
"""

import functools

import torch

from . import nvrtc, rules
from .dispatch import Op, Planned, Variants


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The contract: torch's ``silu`` (fp32 inside, one rounding), then one rounded product (any dtype, any device)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def reference_value_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """The contract of ``order="value_gate"``: the same with the halves the other way round."""
    up, gate = gate_up.chunk(2, dim=-1)
    return up * torch.nn.functional.silu(gate)


def check(gate_up) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up must be [S, 2F], got shape {list(gate_up.shape)}")


OP = Op("swiglu", reference, ("gate_up",), check)
OPS = Variants("order", gate_value=OP, value_gate=Op("swiglu_value_gate", reference_value_gate, OP.signature, check))


VECTORS_PER_THREAD = 2


def _plan_cuda(gate_up, value_first):
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    dtype, device = gate_up.dtype, gate_up.device
    threads = rules.column_threads(-(-width // (8 * VECTORS_PER_THREAD)))
    kernel = nvrtc.kernel(
        "swiglu", "PPq", gate_up.get_device(), F=width, THREADS=threads, VECTORS=VECTORS_PER_THREAD, VALUE_FIRST=value_first
    )
    grid = tokens * -(-width // (8 * threads * VECTORS_PER_THREAD))
    stride = gate_up.stride(0)

    def launch(gate_up):
        out = torch.empty((tokens, width), dtype=dtype, device=device)
        if grid:
            kernel.launch(grid, threads, gate_up.data_ptr(), out.data_ptr(), stride)
        return out

    return launch


def _run_triton(gate_up, value_first):
    from .triton_ops import swiglu as kernels

    return kernels.swiglu(gate_up, value_first)


_DTYPES = {"gate_up": rules.BF16}
for _order, _op in OPS.items():
    _first = {"value_first": _order == "value_gate"}
    _op.add_backend(
        "cuda", Planned(functools.partial(_plan_cuda, **_first)),
        rules.cuda(_DTYPES, rules.halves("gate_up"), rules.vector_rows("gate_up")),
    )
    _op.add_backend("triton", functools.partial(_run_triton, **_first), rules.triton(_DTYPES, rules.dense("gate_up")))


def swiglu(gate_up: torch.Tensor, order: str = "gate_value") -> torch.Tensor:
    """``silu(gate) * up``, rounded after ``silu`` and after the product.

    Args:
        gate_up: ``[S, 2F]``; only read.
        order: of its halves, ``gate_value`` (ComfyUI) or ``value_gate`` (diffusers).

    Returns:
        new ``[S, F]``, contiguous, dtype of ``gate_up``.

    Raises:
        ValueError: ``gate_up`` is not ``[S, 2F]``.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return _registered(gate_up, order)
    return OPS[order](gate_up)


@torch.library.custom_op("h3_vortex::swiglu", mutates_args=())
def _registered(gate_up: torch.Tensor, order: str = "gate_value") -> torch.Tensor:
    return OPS[order](gate_up)


@_registered.register_fake
def _fake(gate_up, order="gate_value"):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)

"""SwiGLU of the fused FC1 output, straight into NVFP4: ``nvfp4_quantize(swiglu(gate_up))`` without writing the activation.

Stock runs ``silu``, ``mul_``, ``abs``, ``amax``, a division and ``quantize_nvfp4``: 10.1 GB of traffic at H3's canonical size, against 4.6 GB
for two passes over ``gate_up``. Recomputing the activation in the second pass moves the same bytes as writing and reading it, and needs no
1.08 GB temporary. comfy-kitchen folds ``swiglu`` into its INT8 quantiser only.
"""

import torch

from . import nvfp4_quantize, swiglu
from .dispatch import Op
from .nvfp4_quantize import Triple, fake_triple, keep_scale, own_scale, stock_contract


def reference(gate_up: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str) -> Triple:
    """The contract: :func:`.swiglu.reference`, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(swiglu.reference(gate_up), tensor_scale, contract)


def check(gate_up, tensor_scale, contract) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu_nvfp4: gate_up must be [S, 2F], got shape {list(gate_up.shape)}")
    nvfp4_quantize.check_scale("swiglu_nvfp4", tensor_scale, gate_up.device)


OP = Op("swiglu_nvfp4", reference, ("gate_up", "tensor_scale", "contract"), check)


def swiglu_nvfp4(gate_up: torch.Tensor, tensor_scale: torch.Tensor | None = None, contract: str | None = None) -> Triple:
    """``silu(gate) * up``, rounded as stock rounds it, quantised as stock quantises it.

    Args:
        gate_up: ``[S, 2F]`` bf16 (other dtypes run on the ``eager`` backend), the gate half first; only read.
        tensor_scale: one fp32 value on the device of ``gate_up`` (a layer's ``input_scale``), or None: computed here.
        contract: as in :func:`.nvfp4_quantize.nvfp4_quantize`.

    Returns:
        ``(qdata uint8 [M16, F16/2], tensor_scale fp32 [], block_scale float8_e4m3fn)`` as :func:`.nvfp4_quantize.nvfp4_quantize`.

    Raises:
        ValueError: ``gate_up`` is not ``[S, 2F]``, or ``tensor_scale`` is not one fp32 value on its device.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_registered(gate_up, tensor_scale, contract), tensor_scale)
    return OP(gate_up, tensor_scale, contract or stock_contract(gate_up.device, gate_up.dtype))


@torch.library.custom_op("h3_vortex::swiglu_nvfp4", mutates_args=())
def _registered(
    gate_up: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return own_scale(OP(gate_up, tensor_scale, contract or stock_contract(gate_up.device, gate_up.dtype)), tensor_scale)


@_registered.register_fake
def _fake(gate_up, tensor_scale, contract):
    return fake_triple(gate_up, gate_up.shape[1] // 2, tensor_scale)

"""SwiGLU of the fused FC1 output, straight into NVFP4: ``nvfp4_quantize(swiglu(gate_up))`` without writing the activation.

Stock runs ``silu``, ``mul_``, ``abs``, ``amax``, a division and ``quantize_nvfp4``: 10.1 GB of traffic at H3's canonical size, against
4.6 GB for two passes over ``gate_up``. Recomputing the activation in the second pass moves the same bytes as writing and reading it, and
needs no 1.08 GB temporary. comfy-kitchen folds ``swiglu`` into its INT8 quantiser only.
"""

import functools

import torch

from . import nvfp4_quantize, nvrtc, rules, swiglu
from .dispatch import Op, Planned
from .nvfp4_quantize import CUDA_CONTRACT, Strip, Triple, block_columns, empty_triple, fake_triple, keep_scale, own_scale, stock_contract


def reference(gate_up: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str) -> Triple:
    """The contract: :func:`.swiglu.reference`, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(swiglu.reference(gate_up), tensor_scale, contract)


def check(gate_up, tensor_scale, contract) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu_nvfp4: gate_up must be [S, 2F], got shape {list(gate_up.shape)}")
    nvfp4_quantize.check_scale("swiglu_nvfp4", tensor_scale, gate_up.device)


OP = Op("swiglu_nvfp4", reference, ("gate_up", "tensor_scale", "contract"), check)


@functools.cache
def fast_silu_is_exact(index: int) -> bool:
    """Whether the kernel's two-instruction silu gives torch's bf16 for all 65536 inputs on this device (NaN equals NaN). Runs once.

    The instructions are approximate and may differ between chips, so this cannot be known beforehand.
    """
    bits = torch.arange(-32768, 32768, dtype=torch.int32, device=torch.device("cuda", index)).to(torch.int16)
    gate, fast = bits.view(torch.bfloat16), torch.empty_like(bits)
    nvrtc.kernel("fast_silu", "PP", index).launch(256, 256, bits.data_ptr(), fast.data_ptr())
    stock = torch.nn.functional.silu(gate)
    return bool(((fast == stock.view(torch.int16)) | (stock.isnan() & fast.view(torch.bfloat16).isnan())).all())


def _plan_cuda(gate_up, tensor_scale, contract):
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if tokens == 0:
        return lambda gate_up, tensor_scale, contract: empty_triple(gate_up, width, tensor_scale)
    index = gate_up.get_device()
    fast = not torch.cuda.is_current_stream_capturing() and fast_silu_is_exact(index)  # the comparison waits for the device
    strip = Strip("swiglu_nvfp4", ("P", "q"), (tokens, width), index, tensor_scale is None, batches=(2, 2), FAST_SILU=fast)
    device, stride = gate_up.device, (gate_up.stride(0),)

    def launch(gate_up, tensor_scale, contract):
        return strip(device, tensor_scale, (gate_up.data_ptr(),), stride)

    return launch


def _run_triton(gate_up, tensor_scale, contract):
    from .triton_ops import swiglu_nvfp4 as kernels

    return kernels.swiglu_nvfp4(gate_up, tensor_scale)


_DTYPES = {"gate_up": rules.BF16}
_COLUMNS = block_columns("gate_up", halves=2)
OP.add_backend("cuda", Planned(_plan_cuda), rules.cuda(_DTYPES, CUDA_CONTRACT, _COLUMNS, rules.vector_rows("gate_up")))
OP.add_backend("triton", _run_triton, rules.triton(_DTYPES, CUDA_CONTRACT, _COLUMNS, rules.dense("gate_up")))


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

"""``swiglu_nvfp4`` against stock's statements and comfy-kitchen on the GPU, byte for byte."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels import swiglu_nvfp4 as op
from h3_vortex.kernels.dispatch import use_backend
from h3_vortex.kernels.nvfp4_quantize import Strip
from h3_vortex.tests.gpu import data
from h3_vortex.tests.gpu.nvfp4 import assert_stock_bytes, differing

pytestmark = pytest.mark.usefixtures("reference_forbidden")
backends = pytest.mark.parametrize("backend", ["cuda", "triton"])
static = pytest.mark.parametrize("scale", [None, 0.0015])


@backends
@static
@pytest.mark.parametrize("kind", data.EVERY)
def test_data(gpu, backend, scale, kind):
    data.require_memory(data.CANONICAL, 28_672)
    assert_stock_bytes(stock.make("swiglu_nvfp4", data.CANONICAL, gpu, draw=data.draw(kind), tensor_scale=scale), backend)


@backends
@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, backend, tokens):
    data.require_memory(tokens, 28_672)
    assert_stock_bytes(stock.make("swiglu_nvfp4", tokens, gpu, draw=data.draw("lognormal")), backend)


@backends
@static
@pytest.mark.parametrize("ffn", [16, 48, 64, 1008, 5376])
def test_widths(gpu, backend, scale, ffn):
    assert_stock_bytes(stock.make("swiglu_nvfp4", 333, gpu, ffn=ffn, draw=data.draw("row_scales"), tensor_scale=scale), backend)


def every_gate(device):
    gate = torch.arange(65_536, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16).view(1024, 64)
    return torch.cat([torch.cat([gate, torch.full_like(gate, up)], 1) for up in (1.0, -3.0, 1e30)])


@backends
@pytest.mark.parametrize("scale", [1.0, 0.0015, 1e30])
def test_every_gate(gpu, backend, scale):
    gate_up, tensor_scale = every_gate(gpu), torch.tensor(scale, device=gpu)
    with use_backend(backend):
        got = op.swiglu_nvfp4(gate_up, tensor_scale)
    assert differing(got, stock.quantize_nvfp4(stock.swiglu(gate_up), tensor_scale)) == 0


@pytest.mark.parametrize("fast", [False, True])
def test_both_silus(gpu, fast):
    """The fast one runs only where the device says that it is exact; the exact one always must be."""
    index = torch.cuda.current_device()
    if fast and not op.fast_silu_is_exact(index):
        pytest.skip("the approximate instructions of this chip do not give torch's silu; the exact form runs here")
    gate_up = every_gate(gpu)
    strip = Strip("swiglu_nvfp4", ("P", "q"), (len(gate_up), 64), index, True, batches=(2, 2), FAST_SILU=fast)
    finite = gate_up.nan_to_num(nan=0.5, posinf=3.0, neginf=-3.0).clamp(-100, 100)  # a NaN tensor scale would hide the codes
    got = strip(gpu, None, (finite.data_ptr(),), (finite.stride(0),))
    assert differing(got, stock.quantize_nvfp4(stock.swiglu(finite))) == 0


@backends
def test_strided_rows(gpu, backend):
    gate_up = torch.randn(257, 3 * 1024, device=gpu).bfloat16()[:, 1024:2048]
    with use_backend(backend):
        assert differing(op.swiglu_nvfp4(gate_up), stock.quantize_nvfp4(stock.swiglu(gate_up))) == 0

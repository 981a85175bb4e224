"""``swiglu`` against ``silu(gate).mul_(up)`` on the GPU, byte for byte, CUDA and Triton; ``silu`` over every bf16 there is."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.swiglu import swiglu
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
backends = pytest.mark.parametrize("backend", ["cuda", "triton"])


@backends
@pytest.mark.parametrize("name", data.EVERY)
def test_data(gpu, backend, name):
    data.assert_stock_bytes(stock.make("swiglu", 9001, gpu, draw=data.draw(name)), backend)


@backends
@pytest.mark.parametrize("tokens", [data.CANONICAL, *data.ROWS])
def test_rows(gpu, backend, tokens):
    data.require_memory(tokens, 28672)
    data.assert_stock_bytes(stock.make("swiglu", tokens, gpu), backend)


@backends
@pytest.mark.parametrize("ffn", [8, 16, 24, 128, 1000, 5376, 7168])
def test_widths(gpu, backend, ffn):
    data.assert_stock_bytes(stock.make("swiglu", 333, gpu, ffn=ffn, draw=data.draw("finite_bits")), backend)


@backends
@pytest.mark.parametrize("up", ["one", "bits"])
def test_silu_of_every_bf16(gpu, backend, up):
    """All 65,536 gates, once with up = 1 (silu itself) and once with random bit patterns."""
    gate = torch.arange(65_536, device=gpu, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    factor = torch.ones_like(gate) if up == "one" else data.any_bits((64, 1024), gpu)
    gate_up = torch.cat([gate, factor], dim=1)
    with data.use_backend(backend):
        got = swiglu(gate_up)
    assert data.differing([got], [stock.swiglu(gate_up)]) == 0


@backends
def test_strided_rows(gpu, backend):
    buffer = torch.randn(257, 3072, device=gpu).bfloat16()
    with data.use_backend(backend):
        got = swiglu(buffer[:, 1024:])
    assert got.is_contiguous() and data.differing([got], [stock.swiglu(buffer[:, 1024:])]) == 0

"""``swiglu_int8`` against kitchen's quantiser with the folded activation on the GPU: codes and scales, byte for byte."""

import pytest
import torch
from h3_vortex.benchmarks.int8_cases import make
from h3_vortex.kernels import swiglu_int8 as module
from h3_vortex.tests.gpu import data, int8_data

OP = "swiglu_int8"


@pytest.mark.parametrize("name", int8_data.EVERY)
def test_data(gpu, reference_forbidden, name):
    tokens = data.CANONICAL if name == "normal" else 12_001
    data.assert_stock_bytes(make(OP, tokens, gpu, draw=int8_data.draw(name)), "cuda")


@pytest.mark.parametrize("tokens", [2, 3, 127, 80_000])
def test_rows(gpu, reference_forbidden, tokens):
    """The last one has offsets beyond 2**31 elements."""
    data.require_memory(tokens, 28_672)
    data.assert_stock_bytes(make(OP, tokens, gpu), "cuda")


@pytest.mark.parametrize("ffn", [256, 512, 2048, 2304, 5376, 16384])
def test_widths(gpu, reference_forbidden, ffn):
    data.assert_stock_bytes(make(OP, 301, gpu, ffn=ffn, draw=int8_data.draw("specials")), "cuda")


def test_every_gate(gpu, reference_forbidden):
    """Each of the 65,536 bf16 patterns as a gate, with ordinary, huge, tiny and special factors."""
    gate = torch.arange(-32768, 32768, device=gpu, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    for up in (torch.randn(64, 1024, device=gpu).bfloat16(), torch.full_like(gate, 1e30), torch.full_like(gate, 1e-30), gate.flip(0, 1)):
        # one group of 256 per row keeps an infinite product from hiding the others
        rows = torch.cat([gate.reshape(256, 256), up.reshape(256, 256)], dim=1)
        with data.use_backend("cuda"):
            assert data.differing(module.swiglu_int8(rows), module.stock(rows)) == 0


def test_strided_rows(gpu, reference_forbidden):
    x = torch.randn(300, 3 * 1024, device=gpu).bfloat16()[:, 1024:2048]
    with data.use_backend("cuda"):
        assert data.differing(module.swiglu_int8(x), module.stock(x.contiguous())) == 0


def test_the_reference_differs_by_the_approximations_alone(gpu):
    """Exact exponential and division in place of the chip's: scales within their error bound, codes within one step and few of them."""
    x = torch.randn(300, 1024, device=gpu).bfloat16()
    (q, scale), (stock_q, stock_scale) = module.reference(x), module.stock(x)
    # exp, sum, quotient and product err by at most 5 units in the last place, and the sums of the rotation, 12 of them, round by half a
    # unit each in either computation: times the sum of magnitudes of a group, over 16
    magnitudes = module.activation(*x.float().chunk(2, dim=1)).abs().view(300, -1, 256).sum(2).amax(1, keepdim=True) / 16
    assert ((scale - stock_scale).abs() <= magnitudes * (5 + 12) * 2.0**-23 / 127).all()
    off = (q.int() - stock_q.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3

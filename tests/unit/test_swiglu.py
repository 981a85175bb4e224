"""``swiglu`` on the CPU: reference against stock's statement, Triton against the reference, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.swiglu import OP, _registered, reference, swiglu
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, same_bytes_or_nan, seeds
from hypothesis import given, settings


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("swiglu") as module:
        yield module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(37, 192), (1, 2), (5, 14), (0, 8)])
def test_reference_is_stock(dtype, shape):
    torch.manual_seed(0)
    gate_up = torch.randn(shape).to(dtype)
    before = gate_up.clone()
    got = swiglu(gate_up)
    assert same_bytes(got, stock.swiglu(gate_up)) and same_bytes(gate_up, before) and got.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    gate_up = fill(pool, seed, 7, 66)
    assert same_bytes(swiglu(gate_up), stock.swiglu(gate_up))


def test_triton_is_the_reference_for_every_gate(triton_kernels):
    """All 65,536 gates. On the CPU two exponentials meet (torch's and numpy's); after the rounding to bf16 nothing of that is left."""
    gate = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    assert same_bytes_or_nan(triton_kernels.swiglu(gate_up), reference(gate_up))


@settings(max_examples=25, deadline=None)
@given(patterns, seeds)
def test_triton_is_the_reference_for_any_bits(triton_kernels, pool, seed):
    gate_up = fill(pool, seed, 3, 150)[:, 70:]
    assert same_bytes_or_nan(triton_kernels.swiglu(gate_up), reference(gate_up))


def test_registered_op():
    torch.library.opcheck(_registered, (torch.randn(5, 32).bfloat16(),))


def test_compiles_whole():
    gate_up = torch.randn(5, 32).bfloat16()
    assert same_bytes(torch.compile(lambda t: swiglu(t) + 1, backend="eager", fullgraph=True)(gate_up), swiglu(gate_up) + 1)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (2, 5, 4)])
def test_what_does_not_fit_is_named(shape):
    with pytest.raises(ValueError, match=r"gate_up must be \[S, 2F\]"):
        swiglu(torch.zeros(shape))


def test_rules_of_the_cuda_backend():
    rules = OP.backends["cuda"].constraints.rules

    def failing(gate_up):
        return next((rule.text for rule in rules if not rule.holds({"gate_up": gate_up})), None)

    buffer = torch.empty(4, 512, dtype=torch.bfloat16)
    assert failing(buffer) is None and failing(buffer[:, 128:]) is None
    assert "multiple of 16" in failing(buffer[:, :24])
    assert "16-byte aligned" in failing(buffer[:, 4:4 + 32])

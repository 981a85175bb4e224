"""``gate_norm_modulate`` on the CPU: both results of the reference against stock's statements, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.gate_norm_modulate import _registered, gate_norm_modulate
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, seeds
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]


def inputs(width=96, dtype=torch.bfloat16, table_dtype=torch.float32):
    torch.manual_seed(0)
    gate, shift, scale = stock.tables(width, "cpu", table_dtype, 3)
    return torch.randn(37, width).to(dtype), torch.randn(37, width).to(dtype), gate, torch.randn(width).to(dtype), shift, scale


def check(x, *rest):
    expected_x, got_x = x.clone(), x.clone()
    expected = stock.gate_norm_modulate(expected_x, *rest, SEGMENTS, 1e-5)
    got = gate_norm_modulate(got_x, *rest, row_map(SEGMENTS, 37, "cpu"), 1e-5)
    assert same_bytes(got, expected) and same_bytes(got_x, expected_x)
    return got_x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
def test_reference_is_stock(dtype, table_dtype):
    args = inputs(96, dtype, table_dtype)
    assert not same_bytes(check(*args), args[0])


@settings(max_examples=60, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    shapes = [(37, 40), (37, 40), (6, 40), (40,), (6, 40), (6, 40)]
    check(*(fill(pool, seed + i, *shape) for i, shape in enumerate(shapes)))


def test_registered_op():
    torch.library.opcheck(_registered, (*inputs(), row_map(SEGMENTS, 37, "cpu"), 1e-5))


def test_compiles_whole():
    x, *rest = inputs()
    rows = row_map(SEGMENTS, 37, "cpu")
    compiled = torch.compile(lambda x: gate_norm_modulate(x, *rest, rows, 1e-5) + x, backend="eager", fullgraph=True)
    a, b = x.clone(), x.clone()
    assert same_bytes(compiled(a), gate_norm_modulate(b, *rest, rows, 1e-5) + b) and same_bytes(a, b)


@pytest.mark.parametrize("at, value, words", [
    (1, torch.zeros(37, 96), "other must be torch.bfloat16"),
    (2, torch.zeros(4, 96), r"shift must be \[R, 96\] with the R of the other tables"),
    (3, torch.zeros(95), r"weight must be \[96\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(at, value, words):
    args = [*inputs(), row_map(SEGMENTS, 37, "cpu"), 1e-5]
    args[at] = value
    with pytest.raises(ValueError, match=words):
        gate_norm_modulate(*args)

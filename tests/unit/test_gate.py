"""``gate`` on the CPU: reference against stock's statement, Triton against the fused product of CUDA, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.gate import _registered, gate
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, same_bytes_or_nan, seeds
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("gate") as module:
        yield module


def inputs(width=96, dtype=torch.bfloat16, table_dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(37, width).to(dtype), torch.randn(37, width).to(dtype), *stock.tables(width, "cpu", table_dtype, 1)


def fused(x, other, gate, rows):
    """``addcmul_`` as CUDA computes it: fma in fp32, then bf16. In fp64 the product is exact, and the sum is exact or rounds alike."""
    return (other.double() * gate.bfloat16()[rows].double() + x.double()).float().bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [7, 96])
def test_reference_is_stock(dtype, table_dtype, width):
    x, other, table = inputs(width, dtype, table_dtype)
    before = other.clone()
    expected = stock.gate(x.clone(), other, table, SEGMENTS)
    got = x.clone()
    assert gate(got, other, table, row_map(SEGMENTS, 37, "cpu")) is got
    assert same_bytes(got, expected) and not same_bytes(got, x) and same_bytes(other, before)


def test_one_row_per_token():
    x, other, table = inputs()
    segments = [(0, 7, 2), (7, 37, torch.randint(0, 6, (30,)))]
    expected = stock.gate(x.clone(), other, table, segments)
    assert same_bytes(gate(x.clone(), other, table, row_map(segments, 37, "cpu")), expected)


@settings(max_examples=60, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    """Width 33: torch's vectorised loop and its tail round ``addcmul_`` differently, and the reference must follow both."""
    x, other, table = fill(pool, seed, 37, 33), fill(pool, seed + 1, 37, 33), fill(pool, seed + 2, 6, 33)
    expected = stock.gate(x.clone(), other, table, SEGMENTS)
    assert same_bytes(gate(x.clone(), other, table, row_map(SEGMENTS, 37, "cpu")), expected)


@settings(max_examples=25, deadline=None)
@given(patterns, seeds)
def test_triton_fuses_the_product_for_any_bits(triton_kernels, pool, seed):
    x, other, table = fill(pool, seed, 5, 40), fill(pool, seed + 1, 5, 40), fill(pool, seed + 2, 6, 40)
    rows = row_map([(0, 1, 5), (1, 3, 0), (3, 5, 2)], 5, "cpu")
    expected = fused(x, other, table, rows)
    assert same_bytes_or_nan(triton_kernels.gate(x.clone(), other, table, rows), expected)


def test_triton_with_fp32_tables_and_strided_rows(triton_kernels):
    buffer, others = torch.randn(9, 3 * 48).bfloat16(), torch.randn(9, 2 * 48).bfloat16()
    (table,) = stock.tables(48, "cpu", torch.float32, 1)
    rows = row_map([(0, 4, 1), (4, 9, 3)], 9, "cpu")
    expected, got = buffer.clone(), buffer.clone()
    expected[:, 48:96] = fused(buffer[:, 48:96], others[:, :48], table, rows)
    triton_kernels.gate(got[:, 48:96], others[:, :48], table, rows)
    assert same_bytes(got, expected)


def test_registered_op():
    torch.library.opcheck(_registered, (*inputs(), row_map(SEGMENTS, 37, "cpu")))


def test_compiles_whole():
    x, other, table = inputs()
    rows = row_map(SEGMENTS, 37, "cpu")
    compiled = torch.compile(lambda x: gate(x, other, table, rows) + 1, backend="eager", fullgraph=True)
    assert same_bytes(compiled(x.clone()), gate(x.clone(), other, table, rows) + 1)


@pytest.mark.parametrize("change, words", [
    (lambda x, other, table, rows: (x, other[1:], table, rows), "other must be"),
    (lambda x, other, table, rows: (x, other.float(), table, rows), "like x"),
    (lambda x, other, table, rows: (x, other, table[0], rows), r"gate must be \[R, 96\]"),
    (lambda x, other, table, rows: (x, other, table, rows[:, None]), r"rows must be int32 \[37\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        gate(*change(*inputs(), row_map(SEGMENTS, 37, "cpu")))

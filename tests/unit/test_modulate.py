"""``modulate`` on the CPU: reference against stock's statements, Triton against the reference, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.kernels.modulate import OP, _registered, modulate, reference
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, same_bytes_or_nan, seeds
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("modulate") as module:
        yield module


def inputs(width=96, dtype=torch.bfloat16, table_dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(37, width).to(dtype), *stock.tables(width, "cpu", table_dtype, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [7, 96])
def test_reference_is_stock(dtype, table_dtype, width):
    h, shift, scale = inputs(width, dtype, table_dtype)
    expected = stock.modulate(h.clone(), shift, scale, SEGMENTS)
    got = h.clone()
    assert modulate(got, shift, scale, row_map(SEGMENTS, 37, "cpu")) is got
    assert same_bytes(got, expected) and not same_bytes(got, h)


def test_one_row_per_token():
    h, shift, scale = inputs()
    segments = [(0, 7, 2), (7, 37, torch.randint(0, 6, (30,)))]
    expected = stock.modulate(h.clone(), shift, scale, segments)
    assert same_bytes(modulate(h.clone(), shift, scale, row_map(segments, 37, "cpu")), expected)


@settings(max_examples=60, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    h, shift, scale = fill(pool, seed, 37, 33), fill(pool, seed + 1, 6, 33), fill(pool, seed + 2, 6, 33)
    expected = stock.modulate(h.clone(), shift, scale, SEGMENTS)
    assert same_bytes(modulate(h.clone(), shift, scale, row_map(SEGMENTS, 37, "cpu")), expected)


@settings(max_examples=25, deadline=None)
@given(patterns, seeds)
def test_triton_is_the_reference_for_any_bits(triton_kernels, pool, seed):
    h, shift, scale = fill(pool, seed, 5, 40), fill(pool, seed + 1, 6, 40), fill(pool, seed + 2, 6, 40)
    rows = row_map([(0, 1, 5), (1, 3, 0), (3, 5, 2)], 5, "cpu")
    expected = reference(h.clone(), shift, scale, rows)
    assert same_bytes_or_nan(triton_kernels.modulate(h.clone(), shift, scale, rows), expected)


def test_triton_with_fp32_tables_and_strided_rows(triton_kernels):
    buffer = torch.randn(9, 3 * 48).bfloat16()
    shift, scale = stock.tables(48, "cpu", torch.float32, 2)
    rows = row_map([(0, 4, 1), (4, 9, 3)], 9, "cpu")
    expected, got = buffer.clone(), buffer.clone()
    reference(expected[:, 48:96], shift, scale, rows)
    triton_kernels.modulate(got[:, 48:96], shift, scale, rows)
    assert same_bytes(got, expected)


def test_registered_op():
    h, shift, scale = inputs()
    torch.library.opcheck(_registered, (h, shift, scale, row_map(SEGMENTS, 37, "cpu")))


def test_compiles_whole():
    h, shift, scale = inputs()
    rows = row_map(SEGMENTS, 37, "cpu")
    compiled = torch.compile(lambda h: modulate(h, shift, scale, rows) + 1, backend="eager", fullgraph=True)
    assert same_bytes(compiled(h.clone()), modulate(h.clone(), shift, scale, rows) + 1)


def test_no_tokens():
    h, shift, scale = inputs()
    assert modulate(h[:0], shift, scale, row_map([], 0, "cpu")).shape == (0, 96)


@pytest.mark.parametrize("change, words", [
    (lambda h, shift, scale, rows: (h[0], shift, scale, rows), r"h must be \[S, H\]"),
    (lambda h, shift, scale, rows: (h, shift[:, :8], scale, rows), r"shift must be \[R, 96\]"),
    (lambda h, shift, scale, rows: (h, shift, scale[:3], rows), r"scale must be \[R, 96\]"),
    (lambda h, shift, scale, rows: (h, shift, scale, rows.long()), "rows must be int32"),
    (lambda h, shift, scale, rows: (h, shift, scale, rows[1:]), r"rows must be int32 \[37\]"),
    (lambda h, shift, scale, rows: (h, shift, scale, rows[:1].expand(37)), r"without gaps .* strides \[0\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, words):
    h, shift, scale = inputs()
    with pytest.raises(ValueError, match=words):
        modulate(*change(h, shift, scale, row_map(SEGMENTS, 37, "cpu")))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_an_explicit_backend_raises_on_the_cpu(backend):
    args = *inputs(), row_map(SEGMENTS, 37, "cpu")
    with use_backend(backend), pytest.raises(BackendUnavailable, match=f"modulate: backend {backend} needs"):
        modulate(*args)
    assert OP.choose(*args) == "eager"

"""``norm_modulate`` on the CPU: reference against stock's statements, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.norm_modulate import OP, _registered, norm_modulate
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, seeds
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]


def inputs(width=96, dtype=torch.bfloat16, table_dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(37, width).to(dtype), torch.randn(width).to(dtype), *stock.tables(width, "cpu", table_dtype, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_reference_is_stock(dtype, table_dtype, eps):
    x, weight, shift, scale = inputs(96, dtype, table_dtype)
    before = x.clone()
    expected = stock.norm_modulate(x, weight, shift, scale, SEGMENTS, eps)
    got = norm_modulate(x, weight, shift, scale, row_map(SEGMENTS, 37, "cpu"), eps)
    assert same_bytes(got, expected) and same_bytes(x, before)


@settings(max_examples=60, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    x, weight, shift, scale = (fill(pool, seed + i, *shape) for i, shape in enumerate([(37, 40), (40,), (6, 40), (6, 40)]))
    expected = stock.norm_modulate(x, weight, shift, scale, SEGMENTS, 1e-5)
    assert same_bytes(norm_modulate(x, weight, shift, scale, row_map(SEGMENTS, 37, "cpu"), 1e-5), expected)


def test_registered_op():
    torch.library.opcheck(_registered, (*inputs(), row_map(SEGMENTS, 37, "cpu"), 1e-5))


def test_compiles_whole():
    x, weight, shift, scale = inputs()
    rows = row_map(SEGMENTS, 37, "cpu")
    compiled = torch.compile(lambda x: norm_modulate(x, weight, shift, scale, rows, 1e-5) + 1, backend="eager", fullgraph=True)
    assert same_bytes(compiled(x), norm_modulate(x, weight, shift, scale, rows, 1e-5) + 1)


@pytest.mark.parametrize("change, words", [
    (lambda x, weight, *rest: (x[:, :, None], weight, *rest), r"x must be \[S, H\]"),
    (lambda x, weight, *rest: (x, weight[:8], *rest), r"weight must be \[96\]"),
    (lambda x, weight, shift, scale, rows, eps: (x, weight, shift, scale[:, 1:], rows, eps), r"scale must be \[R, 96\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        norm_modulate(*change(*inputs(), row_map(SEGMENTS, 37, "cpu"), 1e-5))


def reason(monkeypatch, *args, torch_version="2.11.0+cu130"):
    """What the CUDA backend would say about ``args`` if they were on a GPU."""
    constraints = OP.backends["cuda"].constraints
    monkeypatch.setattr(torch, "__version__", torch_version)
    for rule in constraints.rules:
        if not rule.holds(dict(zip(OP.signature, args, strict=True))):
            return rule.text
    return None


def test_rules_of_the_cuda_backend(monkeypatch):
    x, weight, shift, scale = inputs()
    rows = row_map(SEGMENTS, 37, "cpu")
    assert reason(monkeypatch, x, weight, shift, scale, rows, 1e-5) is None
    assert "torch 2.9" in reason(monkeypatch, x, weight, shift, scale, rows, 1e-5, torch_version="2.8.0")
    assert reason(monkeypatch, x, weight, shift, scale, rows, 1e-5, torch_version="2.10.0a0+git") is None
    assert reason(monkeypatch, x, weight, shift, scale.bfloat16(), rows, 1e-5) is None  # each table is rounded by itself
    assert "multiple of 8" in reason(monkeypatch, x[:, :90], weight[:90], shift[:, :90], scale[:, :90], rows, 1e-5)
    wide = torch.empty(2, 8200, dtype=torch.bfloat16)
    assert "at most 8192" in reason(monkeypatch, wide, wide[0], wide, wide, rows[:2], 1e-5)
    shifted = torch.empty(37 * 96 + 1, dtype=torch.bfloat16)[1:].view(37, 96)
    assert "16-byte aligned" in reason(monkeypatch, shifted, weight, shift, scale, rows, 1e-5)
    transposed = torch.empty(96, 40, dtype=torch.bfloat16).t()[:37]
    assert "16-byte aligned" in reason(monkeypatch, transposed, weight, shift, scale, rows, 1e-5)

"""The norm forms are their parts in order: gate, RMSNorm, modulation, rotation, quantisation, each with its rounding."""

import pytest
import torch
from h3_vortex.kernels import gate_norm_modulate, norm_modulate, quantize_rotate_int8
from h3_vortex.kernels import norm_modulate_int8 as module
from h3_vortex.kernels.segments import row_map

ROWS, WIDTH = 9, 512
SEGMENTS = [(0, 2, 1), (2, 2, 0), (2, 9, 3)]


@pytest.fixture
def call():
    """x, other, gate, weight, shift, scale, rows, eps with fp32 tables as column chunks of one tensor."""
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(ROWS, WIDTH, generator=generator).bfloat16() for _ in range(2))
    shift, scale, gate = torch.randn(4, 3 * WIDTH, generator=generator).chunk(3, dim=1)
    weight = (1 + 0.1 * torch.randn(WIDTH, generator=generator)).bfloat16()
    return x, other, gate, weight, shift, scale, row_map(SEGMENTS, ROWS, "cpu"), 1e-5


def equal(got, expected):
    return torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_norm_form(call):
    x, _, _, weight, shift, scale, rows, eps = call
    before = x.clone()
    got = module.norm_modulate_int8(x, weight, shift, scale, rows, eps)
    assert equal(got, quantize_rotate_int8.reference(norm_modulate.reference(x, weight, shift, scale, rows, eps)))
    assert torch.equal(x, before)


def test_gate_form_updates_x_in_place(call):
    x, other, *rest = call
    expected_x, before = x.clone(), other.clone()
    expected = quantize_rotate_int8.reference(gate_norm_modulate.reference(expected_x, other, *rest))
    assert equal(module.gate_norm_modulate_int8(x, other, *rest), expected)
    assert torch.equal(x, expected_x) and torch.equal(other, before)


def test_bf16_tables_give_the_bytes_of_fp32_ones(call):
    x, other, gate, weight, shift, scale, rows, eps = call
    rounded = [t.bfloat16() for t in (gate, shift, scale)]
    a = module.gate_norm_modulate_int8(x.clone(), other, gate, weight, shift, scale, rows, eps)
    assert equal(module.gate_norm_modulate_int8(x.clone(), other, rounded[0], weight, *rounded[1:], rows, eps), a)


def test_stock_is_the_reference_with_kitchens_quantiser(call, monkeypatch):
    """The stock chain takes segments, the op a row map; up to the quantiser (CUDA only) they are the same bytes."""
    x, other, gate, weight, shift, scale, rows, eps = call
    monkeypatch.setattr(quantize_rotate_int8, "stock", quantize_rotate_int8.reference)
    assert equal(
        module.stock(x, weight, shift, scale, SEGMENTS, eps), module.norm_modulate_int8(x, weight, shift, scale, rows, eps))
    y = x.clone()
    expected = module.stock_gated(y, other, gate, weight, shift, scale, SEGMENTS, eps)
    assert equal(module.gate_norm_modulate_int8(x, other, gate, weight, shift, scale, rows, eps), expected) and torch.equal(x, y)


@pytest.mark.parametrize(("position", "value", "words"), [
    (0, torch.zeros(ROWS, WIDTH), "x and weight must be bfloat16"),
    (1, torch.zeros(WIDTH - 256), "weight must be"),
    (2, torch.zeros(4, WIDTH + 256), "shift must be"),
    (4, torch.zeros(ROWS, dtype=torch.int64), "rows must be int32"),
])
def test_what_fits_no_backend_is_refused(call, position, value, words):
    x, _, _, weight, shift, scale, rows, eps = call
    args = [x, weight, shift, scale, rows, eps]
    args[position] = value
    with pytest.raises(ValueError, match=words):
        module.norm_modulate_int8(*args)


def test_width_must_be_whole_groups():
    x, table = torch.zeros(4, 384, dtype=torch.bfloat16), torch.zeros(1, 384)
    with pytest.raises(ValueError, match="norm_modulate_int8: columns must be a multiple of 256"):
        module.norm_modulate_int8(x, table[0].bfloat16(), table, table, row_map([(0, 4, 0)], 4, "cpu"), 1e-5)


def test_no_rows(call):
    x, _, _, weight, shift, scale, rows, eps = call
    q, row_scale = module.norm_modulate_int8(x[:0], weight, shift, scale, rows[:0], eps)
    assert q.shape == (0, WIDTH) and row_scale.shape == (0, 1)


@pytest.mark.parametrize("gated", [False, True])
def test_registered_ops_agree_with_their_fakes(call, gated):
    x, other, gate, *rest = call
    name = "gate_norm_modulate_int8" if gated else "norm_modulate_int8"
    args = (x, other, gate, *rest) if gated else (x, *rest)
    torch.library.opcheck(getattr(torch.ops.h3_vortex, name).default, args, test_utils=("test_schema", "test_faketensor"))

"""The norm forms against stock's gate, norm, modulation and kitchen's quantiser on the GPU: codes, scales, residual, byte for byte."""

import pytest
import torch
from h3_vortex.benchmarks.int8_cases import make
from h3_vortex.kernels import norm_modulate_int8 as module
from h3_vortex.kernels import stock
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.gpu import data, int8_data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
ops = pytest.mark.parametrize("op", ["norm_modulate_int8", "gate_norm_modulate_int8"])
dtypes = pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])


@ops
@dtypes
@pytest.mark.parametrize("name", int8_data.EVERY)
def test_data(gpu, op, table_dtype, name):
    tokens = data.CANONICAL if name in ("normal", "cauchy", "outlier_channels") else 12_001
    weight = int8_data.weight(name, 5376, gpu)
    data.assert_stock_bytes(make(op, tokens, gpu, table_dtype=table_dtype, weight=weight, draw=int8_data.draw(name)), "cuda")


@ops
@pytest.mark.parametrize("tokens", [2, 3, 127, 37_824])
def test_rows(gpu, op, tokens):
    data.assert_stock_bytes(make(op, tokens, gpu), "cuda")


def test_offsets_beyond_2_to_the_31(gpu):
    data.require_memory(410_000, 5376)
    data.assert_stock_bytes(make("norm_modulate_int8", 410_000, gpu), "cuda")


@ops
@pytest.mark.parametrize("width", [256, 512, 768, 2560, 5120, 6144, 8192])
def test_widths(gpu, op, width):
    data.assert_stock_bytes(make(op, 1001, gpu, width=width, draw=int8_data.draw("lognormal")), "cuda")


@ops
@pytest.mark.parametrize("count", [1, 3, 101])
def test_segments(gpu, op, count):
    data.assert_stock_bytes(make(op, 5003, gpu, segments=data.segments(count, 5003)), "cuda")


@ops
def test_one_row_per_token(gpu, op):
    rows = torch.randint(0, stock.TABLE_ROWS, (3000,), device=gpu)
    data.assert_stock_bytes(make(op, 3100, gpu, segments=[(0, 100, 2), (100, 3100, rows)]), "cuda")


def test_strided_rows(gpu):
    segments = [(0, 50, 1), (50, 257, 3)]
    x, other = (torch.randn(257, 3 * 512, device=gpu).bfloat16()[:, 512:1024] for _ in range(2))
    weight = torch.randn(512, device=gpu).bfloat16()
    gate, shift, scale = stock.tables(512, gpu, torch.float32, 3)
    expected_x = x.contiguous()
    expected = module.stock_gated(expected_x, other, gate, weight, shift, scale, segments, 1e-5)
    with data.use_backend("cuda"):
        got = module.gate_norm_modulate_int8(x, other, gate, weight, shift, scale, row_map(segments, 257, gpu), 1e-5)
    assert data.differing((*got, x), (*expected, expected_x)) == 0


def test_another_summation_order_would_show(gpu):
    """Torch's composite norm in front of the same quantiser changes codes: the comparisons above can tell."""
    x, weight = torch.randn(8192, 5376, device=gpu).bfloat16(), torch.randn(5376, device=gpu).bfloat16()
    table = torch.zeros(1, 5376, device=gpu)
    wide = x.float()
    composite = (weight.float() * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * wide)).bfloat16()
    from h3_vortex.kernels import quantize_rotate_int8

    assert data.differing(quantize_rotate_int8.stock(composite), module.stock(x, weight, table, table, [(0, 8192, 0)], 1e-5)) > 0

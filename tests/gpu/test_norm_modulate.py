"""``norm_modulate`` against ``F.rms_norm`` and ``_mod_scale_shift`` on the GPU, byte for byte."""

import pytest
import torch
from h3_vortex.kernels import nvrtc, stock
from h3_vortex.kernels.norm_modulate import norm_modulate
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
dtypes = pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])


@dtypes
@pytest.mark.parametrize("name", data.EVERY)
def test_data(gpu, table_dtype, name):
    data.assert_stock_bytes(stock.make("norm_modulate", data.CANONICAL, gpu, table_dtype=table_dtype, draw=data.draw(name)), "cuda")


@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, tokens):
    data.require_memory(tokens, 5376)
    data.assert_stock_bytes(stock.make("norm_modulate", tokens, gpu, draw=data.draw("lognormal")), "cuda")


@dtypes
@pytest.mark.parametrize("width", [8, 24, 96, 128, 256, 1032, 2560, 3072, 4096, 5120, 6144, 7168, 8192])
def test_widths(gpu, table_dtype, width):
    case = stock.make("norm_modulate", 3001, gpu, width=width, table_dtype=table_dtype, draw=data.draw("lognormal"))
    data.assert_stock_bytes(case, "cuda")


@dtypes
@pytest.mark.parametrize("count", [1, 3, 101])
def test_segments(gpu, table_dtype, count):
    segments = data.segments(count, 5003)
    data.assert_stock_bytes(stock.make("norm_modulate", 5003, gpu, table_dtype=table_dtype, segments=segments), "cuda")


def test_one_row_per_token(gpu):
    rows = torch.randint(0, stock.TABLE_ROWS, (3000,), device=gpu)
    data.assert_stock_bytes(stock.make("norm_modulate", 3100, gpu, segments=[(0, 100, 2), (100, 3100, rows)]), "cuda")


def test_tables_of_two_dtypes(gpu):
    x, weight = torch.randn(300, 5376, device=gpu).bfloat16(), torch.randn(5376, device=gpu).bfloat16()
    shift, scale = stock.tables(5376, gpu, torch.float32, 2)
    segments = [(0, 100, 1), (100, 300, 3)]
    expected = stock.norm_modulate(x, weight, shift, scale.bfloat16(), segments, 1e-5)
    with data.use_backend("cuda"):
        got = norm_modulate(x, weight, shift, scale.bfloat16(), row_map(segments, 300, gpu), 1e-5)
    assert data.differing([got], [expected]) == 0


@pytest.mark.parametrize("eps", [1e-6, 0.0, 0.5])
def test_eps(gpu, eps):
    data.assert_stock_bytes(stock.make("norm_modulate", 1000, gpu, eps=eps, draw=data.draw("row_scales")), "cuda")


def test_arithmetic_of_sm_80_to_89(gpu, monkeypatch):
    """bf16 products and sums as fma, the only form those chips have: same bytes."""
    from h3_vortex.kernels.norm_modulate import OP

    original, older = nvrtc.kernel, []

    def forced(name, parameters, index, options=(), **defines):
        older.append(name)
        return original(name, parameters, index, options, FORCE_FMA=1, **defines)

    monkeypatch.setattr(nvrtc, "kernel", forced)
    OP._choices.clear()
    data.assert_stock_bytes(stock.make("norm_modulate", 4001, gpu, draw=data.draw("finite_bits")), "cuda")
    assert older == ["norm_modulate"]
    OP._choices.clear()


def test_another_summation_order_would_show(gpu):
    """Torch's composite formula sums in another order and differs in a few elements: the comparison above can tell."""
    x, weight = torch.randn(20_000, 5376, device=gpu).bfloat16(), torch.randn(5376, device=gpu).bfloat16()
    wide = x.float()
    composite = (weight.float() * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * wide)).bfloat16()
    assert data.differing([composite], [torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)]) > 0


def test_strided_rows(gpu):
    segments = [(0, 50, 1), (50, 257, 3)]
    buffer, weight = torch.randn(257, 3 * 512, device=gpu).bfloat16(), torch.randn(512, device=gpu).bfloat16()
    shift, scale = stock.tables(512, gpu, torch.float32, 2)
    x = buffer[:, 512:1024]
    expected = stock.norm_modulate(x, weight, shift, scale, segments, 1e-5)
    with data.use_backend("cuda"):
        got = norm_modulate(x, weight, shift, scale, row_map(segments, 257, gpu), 1e-5)
    assert got.is_contiguous() and data.differing([got], [expected]) == 0

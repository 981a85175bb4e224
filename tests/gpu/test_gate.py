"""``gate`` against ComfyUI's ``_mod_gate`` (torch's ``addcmul_``) on the GPU, byte for byte, CUDA and Triton."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
backends = pytest.mark.parametrize("backend", ["cuda", "triton"])
dtypes = pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])


@backends
@dtypes
@pytest.mark.parametrize("name", data.EVERY)
def test_data(gpu, backend, table_dtype, name):
    data.assert_stock_bytes(stock.make("gate", data.CANONICAL, gpu, table_dtype=table_dtype, draw=data.draw(name)), backend)


@backends
@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, backend, tokens):
    data.require_memory(tokens, 5376)
    data.assert_stock_bytes(stock.make("gate", tokens, gpu, draw=data.draw("lognormal")), backend)


@backends
@pytest.mark.parametrize("width", [8, 24, 96, 1032, 4096, 14336])
def test_widths(gpu, backend, width):
    data.assert_stock_bytes(stock.make("gate", 333, gpu, width=width, draw=data.draw("finite_bits")), backend)


@backends
@dtypes
@pytest.mark.parametrize("count", [1, 3, 101])
def test_segments(gpu, backend, table_dtype, count):
    segments = data.segments(count, 5003)
    data.assert_stock_bytes(stock.make("gate", 5003, gpu, table_dtype=table_dtype, segments=segments), backend)


@backends
def test_one_row_per_token(gpu, backend):
    rows = torch.randint(0, stock.TABLE_ROWS, (3000,), device=gpu)
    data.assert_stock_bytes(stock.make("gate", 3100, gpu, segments=[(0, 100, 2), (100, 3100, rows)]), backend)


@backends
def test_the_product_is_fused_into_the_sum(gpu, backend):
    """Random bit patterns tell fma(o, g, x) from o * g + x: the two must differ somewhere, or the data sets above prove nothing."""
    x, other, gate = (data.finite_bits((4096, 512), gpu) for _ in range(3))
    twice_rounded = (other.float() * gate[:1].float() + x.float()).bfloat16()
    expected = x.clone()
    stock.gate(expected, other, gate, [(0, 4096, 0)])
    with data.use_backend(backend):
        got = stock.gate_op(x.clone(), other, gate, row_map([(0, 4096, 0)], 4096, gpu))
    assert data.differing([got], [expected]) == 0
    assert data.differing([twice_rounded], [expected]) > 0


@backends
def test_strided_rows_and_untouched_neighbours(gpu, backend):
    segments = [(0, 50, 1), (50, 257, 3)]
    buffer, others = (torch.randn(257, 3 * 512, device=gpu).bfloat16() for _ in range(2))
    (gate,) = stock.tables(512, gpu, torch.float32, 1)
    expected, got = buffer.clone(), buffer.clone()
    stock.gate(expected[:, 512:1024], others[:, :512], gate, segments)
    with data.use_backend(backend):
        stock.gate_op(got[:, 512:1024], others[:, :512], gate, row_map(segments, 257, gpu))
    assert data.differing([got], [expected]) == 0

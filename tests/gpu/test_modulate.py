"""``modulate`` against ComfyUI's ``_mod_scale_shift`` on the GPU, byte for byte, CUDA and Triton."""

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
    data.assert_stock_bytes(stock.make("modulate", data.CANONICAL, gpu, table_dtype=table_dtype, draw=data.draw(name)), backend)


@backends
@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, backend, tokens):
    data.require_memory(tokens, 5376)
    data.assert_stock_bytes(stock.make("modulate", tokens, gpu, draw=data.draw("lognormal")), backend)


@backends
@pytest.mark.parametrize("width", [8, 24, 96, 1032, 4096, 14336])
def test_widths(gpu, backend, width):
    data.assert_stock_bytes(stock.make("modulate", 333, gpu, width=width, draw=data.draw("finite_bits")), backend)


@backends
@dtypes
@pytest.mark.parametrize("count", [1, 3, 101])
def test_segments(gpu, backend, table_dtype, count):
    segments = data.segments(count, 5003)
    data.assert_stock_bytes(stock.make("modulate", 5003, gpu, table_dtype=table_dtype, segments=segments), backend)


@backends
def test_one_row_per_token(gpu, backend):
    rows = torch.randint(0, stock.TABLE_ROWS, (3000,), device=gpu)
    data.assert_stock_bytes(stock.make("modulate", 3100, gpu, segments=[(0, 100, 2), (100, 3100, rows)]), backend)


@backends
def test_strided_rows_and_untouched_neighbours(gpu, backend):
    segments = [(0, 50, 1), (50, 257, 3)]
    buffer = torch.randn(257, 3 * 512, device=gpu).bfloat16()
    shift, scale = stock.tables(512, gpu, torch.float32, 2)
    expected, got = buffer.clone(), buffer.clone()
    stock.modulate(expected[:, 512:1024], shift, scale, segments)
    with data.use_backend(backend):
        stock.modulate_op(got[:, 512:1024], shift, scale, row_map(segments, 257, gpu))
    assert data.differing([got], [expected]) == 0

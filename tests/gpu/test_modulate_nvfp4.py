"""The three modulation-to-NVFP4 ops against stock's statements and comfy-kitchen on the GPU, byte for byte."""

import pytest
import torch
from h3_vortex.kernels import modulate_nvfp4 as op
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import use_backend
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.gpu import data
from h3_vortex.tests.gpu.nvfp4 import FAST, assert_stock_bytes, differing

pytestmark = pytest.mark.usefixtures("reference_forbidden")
paths = pytest.mark.parametrize("name, backend", [path for path in FAST if "modulate" in path[0]])
dtypes = pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
static = pytest.mark.parametrize("scale", [None, 0.0015])


@paths
@static
@pytest.mark.parametrize("kind", data.EVERY)
def test_data(gpu, name, backend, scale, kind):
    assert_stock_bytes(stock.make(name, data.CANONICAL, gpu, draw=data.draw(kind), tensor_scale=scale), backend)


@paths
@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, name, backend, tokens):
    data.require_memory(tokens, 5376)
    assert_stock_bytes(stock.make(name, tokens, gpu, draw=data.draw("lognormal")), backend)


@paths
@pytest.mark.parametrize("tokens", (1, 15, 16, 127, 129))
def test_rows_with_a_given_scale(gpu, name, backend, tokens):
    assert_stock_bytes(stock.make(name, tokens, gpu, draw=data.draw("lognormal"), tensor_scale=0.0015), backend)


@paths
@static
@pytest.mark.parametrize("width", [16, 48, 64, 1008, 4096, 8192])
def test_widths(gpu, name, backend, scale, width):
    assert_stock_bytes(stock.make(name, 333, gpu, width=width, draw=data.draw("row_scales"), tensor_scale=scale), backend)


@paths
@dtypes
@static
@pytest.mark.parametrize("count", [1, 3, 101])
def test_segments(gpu, name, backend, table_dtype, scale, count):
    segments = data.segments(count, 5003)
    assert_stock_bytes(stock.make(name, 5003, gpu, table_dtype=table_dtype, segments=segments, tensor_scale=scale), backend)


@paths
def test_segments_at_canonical_size(gpu, name, backend):
    assert_stock_bytes(stock.make(name, data.CANONICAL, gpu, segments=data.segments(101, data.CANONICAL)), backend)


@paths
def test_one_row_per_token(gpu, name, backend):
    rows = torch.randint(0, stock.TABLE_ROWS, (3000,), device=gpu)
    assert_stock_bytes(stock.make(name, 3100, gpu, segments=[(0, 100, 2), (100, 3100, rows)]), backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_strided_rows(gpu, backend):
    segments = [(0, 50, 1), (50, 257, 3)]
    h = torch.randn(257, 3 * 512, device=gpu).bfloat16()[:, 512:1024]
    shift, scale = stock.tables(512, gpu, torch.float32, 2)
    expected = stock.quantize_nvfp4(stock.modulate(h.contiguous(), shift, scale, segments))
    with use_backend(backend):
        assert differing(op.modulate_nvfp4(h, shift, scale, row_map(segments, 257, gpu)), expected) == 0

"""``quantize_rotate_int8`` against kitchen's CUDA quantiser on the GPU: codes and scales, byte for byte."""

import pytest
import torch
from h3_vortex.benchmarks.int8_cases import make
from h3_vortex.kernels import quantize_rotate_int8 as module
from h3_vortex.tests.gpu import data, int8_data

OP = "quantize_rotate_int8"


@pytest.mark.parametrize("width", [7168, 5376])
@pytest.mark.parametrize("name", int8_data.EVERY)
def test_data(gpu, reference_forbidden, name, width):
    tokens = data.CANONICAL if name in ("normal", "cauchy") else 12_001
    data.assert_stock_bytes(make(OP, tokens, gpu, width=width, draw=int8_data.draw(name)), "cuda")


@pytest.mark.parametrize("tokens", [2, 3, 127, 37_824])
def test_rows(gpu, reference_forbidden, tokens):
    data.assert_stock_bytes(make(OP, tokens, gpu, width=7168), "cuda")


@pytest.mark.parametrize("width", [256, 512, 1280, 3584, 3840, 6144, 7424, 10752, 14336, 16384])
def test_widths(gpu, reference_forbidden, width):
    data.assert_stock_bytes(make(OP, 301, gpu, width=width, draw=int8_data.draw("specials")), "cuda")


def test_offsets_beyond_2_to_the_31(gpu, reference_forbidden):
    data.require_memory(310_000, 7168)
    data.assert_stock_bytes(make(OP, 310_000, gpu, width=7168), "cuda")


def test_strided_rows(gpu, reference_forbidden):
    buffer = torch.randn(300, 3 * 512, device=gpu).bfloat16()
    x = buffer[:, 512:1024]
    with data.use_backend("cuda"):
        assert data.differing(module.quantize_rotate_int8(x), module.stock(x.contiguous())) == 0


@pytest.mark.parametrize("name", int8_data.EVERY)
def test_the_reference_is_stock(gpu, name):
    data.assert_stock_bytes(make(OP, 301, gpu, width=1280, draw=int8_data.draw(name)), "eager")


def test_kitchens_matrix_product_would_show(gpu):
    """The rotation that kitchen falls back to gives other codes and scales: the comparisons above can tell."""
    from comfy_kitchen.backends import cuda
    from comfy_kitchen.tensor.int8_utils import _build_hadamard

    x = torch.randn(2000, 5376, device=gpu).bfloat16()
    q, scale = cuda.quantize_and_rotate_rowwise(x, _build_hadamard(256, device=gpu, dtype=torch.bfloat16), 256)
    assert data.differing((q, scale.view(-1, 1)), module.stock(x)) > 0

"""The FP4 product of inputs that our ops quantised equals the product of stock's, on tensor cores that have it."""

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from h3_vortex.kernels import nvfp4_quantize as op
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import use_backend
from h3_vortex.tests.gpu.nvfp4 import FAST, WIDTH, differing

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name, backend", FAST)
@pytest.mark.parametrize("tokens", [1, 129, 15_499, 37_810])
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_product_is_stock_s(name, backend, tokens, scale):
    torch.manual_seed(0)
    case = stock.make(name, tokens, DEVICE, width=WIDTH.get(name, 5376), tensor_scale=scale)
    expected = case.stock(*case.inputs())
    with use_backend(backend):
        got = case.ours(*case.inputs())
    assert differing(got, expected) == 0
    width = 2 * got[0].shape[1]
    weight = QuantizedTensor.from_float(torch.randn(512, width, device=DEVICE).bfloat16(), op.LAYOUT)
    products = [
        torch.nn.functional.linear(op.as_quantized(triple[:3], torch.bfloat16, (tokens, width)), weight) for triple in (got, expected)
    ]
    assert products[0].shape == (tokens, 512) and torch.equal(*products)
    reference = torch.mm(op.as_quantized(expected[:3], torch.bfloat16, (tokens, width)).dequantize(), weight.dequantize().t())
    assert torch.allclose(products[0].float(), reference.float(), rtol=0.05, atol=0.05 * reference.float().abs().max().item())


@pytest.mark.parametrize("software", [0, 1])
def test_conversion_instruction_and_software_agree(software):
    x = (torch.randn(4099, 5376, device=DEVICE) * torch.exp2(torch.randint(-30, 10, (4099, 1), device=DEVICE).float())).bfloat16()
    strip = op.Strip("nvfp4_quantize", ("P", "q"), x.shape, x.get_device(), True, FORCE_SOFTWARE=software)
    assert differing(strip(DEVICE, None, (x.data_ptr(),), (x.stride(0),)), stock.quantize_nvfp4(x)) == 0

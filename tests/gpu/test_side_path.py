"""The branch of a Turbo LoRA at H3's own sizes on CUDA: error, repeatability, and no temporary of the layer's width."""

import pytest
import torch
from h3_vortex.benchmarks import shapes, turbo
from h3_vortex.kernels.patch import side_path
from h3_vortex.tests.unit.test_side_path import OPS

ROWS = shapes.JOBS["canonical"].rows
LAYERS = {"blocks.0.attn.qkv_proj": 5376, "blocks.0.attn.out_proj": 7168, "blocks.0.mlp.fc1": 5376, "blocks.0.mlp.fc2": 14336}


@pytest.fixture(scope="module")
def lora(gpu):
    return turbo.random_lora(shapes.MODELS["h3"].with_blocks(1), gpu)


@pytest.mark.parametrize("layer", LAYERS)
def test_full_size(gpu, lora, layer):
    pair = lora[layer]
    out_width, into = pair.shape
    assert into == LAYERS[layer]
    weights = side_path._weights(OPS, {layer: pair})
    branch = side_path.Branch(OPS, weights.get_submodule(layer.replace(".", "_")), pair, 1.0)
    generator = torch.Generator(gpu).manual_seed(0)
    x = torch.randn(ROWS, into, dtype=torch.bfloat16, device=gpu, generator=generator)
    base = torch.randn(ROWS, out_width, dtype=torch.bfloat16, device=gpu, generator=generator)
    with torch.inference_mode():
        out = branch.add(x, base.clone())
        again = base.clone()
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        resident = torch.cuda.memory_allocated(gpu)
        branch.add(x, again)
        torch.cuda.synchronize(gpu)
        peak = torch.cuda.max_memory_allocated(gpu) - resident
    assert torch.equal(out, again)
    hidden = ROWS * pair.rank * 2
    assert peak < 2 * hidden + 2**26, f"{peak} bytes beside a hidden tensor of {hidden}"  # cuBLAS keeps a workspace of its own
    rows = torch.randint(0, ROWS, (64,), device=gpu, generator=generator)
    exact = base[rows].double() + x[rows].double() @ pair.dense().to(gpu).T
    eps = torch.finfo(torch.bfloat16).eps
    size = x[rows].double().norm(dim=1, keepdim=True) * pair.dense().norm(dim=1).to(gpu)
    assert bool(((out[rows].double() - exact).abs() <= eps * (size + exact.abs())).all())

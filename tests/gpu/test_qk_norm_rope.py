"""``qk_norm_rope`` against comfy-kitchen's CUDA ``rms_rope_split_half_`` on the GPU, byte for byte; v must stay as it was."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.qk_norm_rope import OP, qk_norm_rope
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")


@pytest.fixture(autouse=True)
def kitchen_cuda(gpu):
    """The contract is kitchen's CUDA kernel; without it (a CUDA 12 torch) there is nothing to compare with."""
    import comfy_kitchen

    if not comfy_kitchen.registry.is_available("cuda"):
        pytest.skip("comfy-kitchen has no CUDA backend here")


@pytest.mark.parametrize("name", data.EVERY)
def test_data(gpu, name):
    data.assert_stock_bytes(stock.make("qk_norm_rope", data.CANONICAL, gpu, draw=data.draw(name)), "cuda")


@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, tokens):
    data.require_memory(tokens, 21504)
    data.assert_stock_bytes(stock.make("qk_norm_rope", tokens, gpu, draw=data.draw("lognormal")), "cuda")


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 9, 16, 57])
def test_heads(gpu, heads):
    data.assert_stock_bytes(stock.make("qk_norm_rope", 515, gpu, heads=heads, draw=data.draw("lognormal")), "cuda")


@pytest.mark.parametrize("eps", [1e-6, 0.0, 0.5])
def test_eps(gpu, eps):
    data.assert_stock_bytes(stock.make("qk_norm_rope", 1000, gpu, eps=eps, draw=data.draw("row_scales")), "cuda")


@pytest.mark.parametrize("name", ["normal", "finite_bits"])
def test_any_rotation_table(gpu, name):
    """Not only cosines and sines: four unrelated coefficients per pair."""
    case = stock.make("qk_norm_rope", 2000, gpu, draw=data.draw("lognormal"))
    table = data.draw(name)((1, 2000, 1, 48, 2, 2), gpu).bfloat16()

    def inputs():
        q, k, _, *rest, _ = case.inputs()
        return q, k, table, *rest

    data.assert_stock_bytes(stock.Case(qk_norm_rope, stock.qk_norm_rope, inputs, 0), "cuda")


def test_contiguous_q_and_k(gpu):
    q, k = (torch.randn(777, 8, 128, device=gpu).bfloat16() for _ in range(2))
    rest = stock.rotation_table(777, gpu, torch.bfloat16), *torch.randn(2, 128, device=gpu).bfloat16().unbind(), 1e-5
    case = stock.Case(qk_norm_rope, stock.qk_norm_rope, lambda: (q.clone(), k.clone(), *rest), 0)
    data.assert_stock_bytes(case, "cuda")


def test_steps_aside_when_stock_runs_kitchens_eager_kernel(gpu):
    import comfy_kitchen

    args = stock.make("qk_norm_rope", 16, gpu, heads=2).inputs()[:6]
    assert OP.reason("cuda", *args) is None
    with comfy_kitchen.registry.use_backend("eager"):
        assert "eager" in OP.reason("cuda", *args)


@pytest.mark.parametrize("change", [lambda a: (a[0][..., :64], a[1][..., :64], a[2][..., :32, :, :], a[3][:64], a[4][:64], a[5]),
                                    lambda a: (*a[:2], a[2].float(), *a[3:]),
                                    lambda a: (*a[:2], a[2][..., :32, :, :], *a[3:])])
def test_other_shapes_and_dtypes_say_why(gpu, change):
    args = change(stock.make("qk_norm_rope", 16, gpu, heads=2).inputs()[:6])
    assert OP.reason("cuda", *args).startswith("needs ")

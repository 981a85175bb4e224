"""The branch beside a layer, without a host: its arithmetic in the activation's dtype, and where it writes."""

from types import SimpleNamespace

import pytest
import torch
from h3_vortex.h3.turbo import Adapter
from h3_vortex.kernels.patch import eligibility, side_path


def cast(linear, rows, offloadable):
    assert offloadable  # the way that supports streaming
    cast.calls += 1
    return linear.weight.to(rows), None if linear.bias is None else linear.bias.to(rows), "stream"


def uncast(linear, weight, bias, stream):
    assert stream == "stream"
    cast.calls -= 1


class Linear(torch.nn.Linear):
    def __init__(self, into, out, bias, device):
        super().__init__(into, out, bias, device)


OPS = SimpleNamespace(cast_bias_weight=cast, uncast_bias_weight=uncast, manual_cast=SimpleNamespace(Linear=Linear))
cast.calls = 0


def draw(*shape, seed=0, std=1.0):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed)) * std


def adapter(out=192, into=96, rank=8, groups=3, bias=False):
    spans = tuple((j * out // groups, (j + 1) * out // groups) for j in range(groups))
    return Adapter(
        draw(groups * rank, into, std=into**-0.5), draw(out, rank, seed=1, std=0.3), spans, (0.5, 0.25, 1.0)[:groups],
        draw(groups * rank, seed=2) if bias else None)  # fmt: skip


def branch(pair, strength=1.0):
    weights = side_path._weights(OPS, {"blocks.0.attn.qkv_proj": pair})
    return side_path.Branch(OPS, weights.blocks_0_attn_qkv_proj, pair, strength)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("strength", [1.0, -0.75])
def test_error_is_that_of_the_dtype_itself(dtype, groups, strength):
    pair = adapter(groups=groups)
    x, base = draw(65, 96, seed=3).to(dtype), draw(65, 192, seed=4, std=2).to(dtype)
    out = branch(pair, strength).add(x, base.clone())
    exact = base.double() + strength * x.double() @ pair.dense().T
    # roundings: the pair's weights and the hidden values (relative to the delta's own size), and the sum
    eps = torch.finfo(dtype).eps
    size = x.double().abs() @ pair.down.double().abs().T
    size = torch.cat([
        abs(strength) * s * size[:, j * 8 : (j + 1) * 8] @ pair.up[a:b].double().abs().T
        for j, ((a, b), s) in enumerate(zip(pair.spans, pair.scales, strict=True))], dim=1)  # fmt: skip
    assert bool(((out.double() - exact).abs() <= eps * (2 * size + exact.abs())).all())
    assert cast.calls == 0  # every weight was given back


def test_three_groups_are_the_block_diagonal_matrix():
    pair = adapter()
    blocks = [pair.up[a:b] * s for (a, b), s in zip(pair.spans, pair.scales, strict=True)]
    x = draw(9, 96, seed=3)
    fused = x.double() @ pair.down.double().T @ torch.block_diag(*blocks).double().T
    assert torch.allclose(branch(pair).add(x, torch.zeros(9, 192)).double(), fused, rtol=0, atol=1e-5)


def test_a_constant_rides_in_the_first_product():
    pair = adapter(groups=1, bias=True)
    x = draw(5, 96, seed=3)
    expected = 0.5 * (x @ pair.down.T + pair.bias) @ pair.up.T
    assert torch.allclose(branch(pair).add(x, torch.zeros(5, 192)), expected, rtol=0, atol=1e-5)


def test_it_writes_into_the_fresh_output_and_nothing_else():
    pair, x, wide = adapter(), draw(9, 96, seed=3), draw(9, 256, seed=4)
    kept, before = x.clone(), wide.clone()
    out = wide[:, :192]  # as a GEMM whose padding was cut off returns it
    result = branch(pair).add(x, out)
    assert result is out and torch.equal(x, kept) and torch.equal(wide[:, 192:], before[:, 192:])
    assert not torch.equal(wide[:, :192], before[:, :192])


def test_more_dimensions_than_two():
    pair = adapter()
    x = draw(2, 3, 96, seed=3)
    out = branch(pair).add(x, torch.zeros(2, 3, 192))
    assert torch.equal(out.view(6, 192), branch(pair).add(x.view(6, 96), torch.zeros(6, 192)))


def test_with_gradients_the_output_is_copied():
    pair, x = adapter(), draw(9, 96, seed=3).requires_grad_()
    out = torch.zeros(9, 192)
    result = branch(pair).add(x, out)
    assert result is not out and not bool(out.any())
    result.sum().backward()
    assert torch.allclose(x.grad[0].double(), pair.dense().sum(0), rtol=0, atol=1e-4)


def test_it_is_a_hook_that_eligibility_sees_through():
    linear = torch.nn.Linear(96, 192)
    home = type(linear).forward.__module__
    assert eligibility.foreign(linear, home) is None
    handle = linear.register_forward_hook(branch(adapter()))
    x = draw(4, 96, seed=3)
    with torch.no_grad():
        assert torch.allclose((linear(x) - linear.forward(x)).double(), x.double() @ adapter().dense().T, rtol=0, atol=1e-5)
    assert eligibility.foreign(linear, home) is None and len(eligibility.side_paths(linear)) == 1
    other = linear.register_forward_hook(lambda *_: None)
    assert eligibility.foreign(linear, home) == "Linear has forward hooks"
    other.remove()
    handle.remove()
    assert not eligibility.side_paths(linear) and not linear._forward_hooks

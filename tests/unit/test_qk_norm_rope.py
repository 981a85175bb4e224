"""``qk_norm_rope`` on the CPU: the reference is comfy-kitchen's own call, on views of one qkv buffer; registration, errors."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.qk_norm_rope import OP, _registered, qk_norm_rope
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, seeds
from hypothesis import given, settings

ck = pytest.importorskip("comfy_kitchen")


def inputs(tokens=9, heads=3, width=128, rot=96, dtype=torch.bfloat16):
    torch.manual_seed(0)
    qkv = torch.randn(tokens, 3 * heads * width).to(dtype)
    freqs = torch.randn(1, tokens, 1, rot // 2, 2, 2).to(dtype)
    return qkv, freqs, torch.randn(width).to(dtype), torch.randn(width).to(dtype)


def views(qkv, heads):
    q, k, _ = qkv.split(qkv.shape[1] // 3, dim=-1)
    return q.view(len(qkv), heads, -1), k.view(len(qkv), heads, -1)


def stock_call(qkv, heads, freqs, q_weight, k_weight, eps):
    """``Attention.forward`` of ComfyUI 0.33, from the split to the rotation."""
    q, k, _ = qkv.split(qkv.shape[1] // 3, dim=-1)
    q, k = (t.view(1, len(qkv), heads, -1) for t in (q, k))
    ck.rms_rope_split_half_(q, k, freqs, q_weight, k_weight, epsilon=eps, rot_dim=freqs.shape[-3] * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width, rot", [(128, 96), (64, 64), (32, 24)])
def test_reference_is_stock(dtype, width, rot):
    qkv, *rest = inputs(width=width, rot=rot, dtype=dtype)
    expected, got = qkv.clone(), qkv.clone()
    stock_call(expected, 3, *rest, 1e-6)
    q, k = views(got, 3)
    returned = qk_norm_rope(q, k, *rest, 1e-6)
    assert returned[0] is q and returned[1] is k
    inner = 3 * width
    assert same_bytes(got, expected) and same_bytes(got[:, 2 * inner:], qkv[:, 2 * inner:])
    assert not same_bytes(got[:, :inner], qkv[:, :inner])


@settings(max_examples=40, deadline=None)
@given(patterns, seeds)
def test_reference_is_stock_for_any_bits(pool, seed):
    shapes = [(5, 3 * 2 * 128), (1, 5, 1, 48, 2, 2), (128,), (128,)]
    qkv, *rest = (fill(pool, seed + i, *shape) for i, shape in enumerate(shapes))
    expected, got = qkv.clone(), qkv.clone()
    stock_call(expected, 2, *rest, 1e-5)
    qk_norm_rope(*views(got, 2), *rest, 1e-5)
    assert same_bytes(got, expected)


def test_registered_op():
    qkv, *rest = inputs()
    q, k = views(qkv, 3)
    torch.library.opcheck(_registered, (q.clone(), k.clone(), *rest, 1e-5))


def test_compiles_whole():
    qkv, *rest = inputs()
    a, b = qkv.clone(), qkv.clone()
    torch.compile(lambda q, k: qk_norm_rope(q, k, *rest, 1e-5), backend="eager", fullgraph=True)(*views(a, 3))
    qk_norm_rope(*views(b, 3), *rest, 1e-5)
    assert same_bytes(a, b)


def test_no_tokens():
    case = stock.make("qk_norm_rope", 0, "cpu", heads=2)
    assert case.ours(*case.inputs())[0].shape == (0, 768)


@pytest.mark.parametrize("at, value, words", [
    (1, torch.zeros(9, 2, 128), r"q and k must both be \[S, heads, D\]"),
    (2, torch.zeros(1, 8, 1, 48, 2, 2), r"freqs must be \[1, 9, 1, rot/2, 2, 2\] with rot <= 128"),
    (2, torch.zeros(1, 9, 1, 65, 2, 2), "with rot <= 128"),
    (4, torch.zeros(96), r"k_weight must have shape \[128\]"),
])  # fmt: skip
def test_what_does_not_fit_is_named(at, value, words):
    qkv, *rest = inputs()
    args = [*views(qkv, 3), *rest, 1e-5]
    args[at] = value
    with pytest.raises(ValueError, match=words):
        qk_norm_rope(*args)


def failing(*args):
    for rule in OP.backends["cuda"].constraints.rules:
        if not rule.holds(dict(zip(OP.signature, args, strict=True))):
            return rule.text
    return None


def test_rules_of_the_cuda_backend(monkeypatch):
    qkv, *rest = inputs()
    q, k = views(qkv, 3)
    monkeypatch.setattr(ck.registry, "get_capable_backend", lambda name, kwargs: "cuda")
    assert failing(q, k, *rest, 1e-5) is None
    assert failing(q.clone().transpose(0, 1).contiguous().transpose(0, 1), k, *rest, 1e-5).startswith("heads packed")
    freqs, *weights = rest
    assert "rotation table" in failing(q, k, freqs[:, :, :, :, ::1].transpose(-1, -2), *weights, 1e-5)
    small, *small_rest = inputs(width=64, rot=64)
    assert "128 channels" in failing(*views(small, 3), *small_rest, 1e-5)
    monkeypatch.setattr(ck.registry, "get_capable_backend", lambda name, kwargs: "eager")
    assert "comfy-kitchen's CUDA kernel" in failing(q, k, *rest, 1e-5)

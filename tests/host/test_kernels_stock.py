"""``kernels/stock.py`` and the references of the bf16 ops against ComfyUI's own functions, byte for byte."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.gate import gate
from h3_vortex.kernels.modulate import modulate
from h3_vortex.kernels.norm_modulate import norm_modulate
from h3_vortex.kernels.qk_norm_rope import qk_norm_rope
from h3_vortex.kernels.segments import row_map
from h3_vortex.kernels.swiglu import swiglu
from h3_vortex.tests.unit.bits import same_bytes

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
TABLES = pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(scope="module")
def minimax(comfy):
    import comfy.ldm.minimax.model

    return comfy.ldm.minimax.model


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@DTYPES
@TABLES
def test_modulation(minimax, dtype, table_dtype):
    h = torch.randn(37, 96).to(dtype)
    shift, scale = stock.tables(96, "cpu", table_dtype, 2)
    expected = minimax._mod_scale_shift(h.clone(), shift, scale, SEGMENTS)
    assert same_bytes(stock.modulate(h.clone(), shift, scale, SEGMENTS), expected)
    assert same_bytes(modulate(h.clone(), shift, scale, row_map(SEGMENTS, 37, "cpu")), expected)


@DTYPES
@TABLES
def test_gate(minimax, dtype, table_dtype):
    x, other = torch.randn(37, 96).to(dtype), torch.randn(37, 96).to(dtype)
    (table,) = stock.tables(96, "cpu", table_dtype, 1)
    expected = minimax._mod_gate(x.clone(), table, other, SEGMENTS)
    assert same_bytes(stock.gate(x.clone(), other, table, SEGMENTS), expected)
    assert same_bytes(gate(x.clone(), other, table, row_map(SEGMENTS, 37, "cpu")), expected)


@DTYPES
def test_norm_and_modulation(minimax, comfy, dtype):
    norm = comfy.ops.disable_weight_init.RMSNorm(96, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(96))
    x = torch.randn(37, 96).to(dtype)
    shift, scale = stock.tables(96, "cpu", torch.float32, 2)
    with torch.inference_mode():
        expected = minimax._mod_scale_shift(norm(x), shift, scale, SEGMENTS)
        assert same_bytes(stock.norm_modulate(x, norm.weight, shift, scale, SEGMENTS, 1e-5), expected)
        assert same_bytes(norm_modulate(x, norm.weight, shift, scale, row_map(SEGMENTS, 37, "cpu"), 1e-5), expected)


@DTYPES
def test_swiglu(comfy, dtype):
    gate_up = torch.randn(37, 192).to(dtype)
    expected = comfy.ops.INPUT_ACT_EAGER["swiglu"](gate_up.clone())
    assert same_bytes(stock.swiglu(gate_up), expected) and same_bytes(swiglu(gate_up), expected)


def test_rope_inside_attention(minimax, comfy, monkeypatch):
    """q and k as ComfyUI's own ``Attention.forward`` hands them to attention."""
    attention = minimax.Attention(64, 2, 128, 1e-5, dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape))
    x, freqs = torch.randn(19, 64).bfloat16(), stock.rotation_table(19, "cpu", torch.bfloat16)
    seen = []

    def keep(q, k, v, heads, **_):
        seen.extend((q, k))
        return torch.zeros(1, 19, heads * 128, dtype=torch.bfloat16)

    class Plain:
        """Stands in for the container that ComfyUI wraps q, k and v in: the tensor alone."""

        def __new__(cls, tensor):
            return tensor

    monkeypatch.setattr(minimax, "optimized_attention", keep)
    monkeypatch.setattr(minimax, "AttentionTensorContainer", Plain)
    with torch.inference_mode():
        attention(x, rope_freqs=freqs)
        q, k, _ = attention.qkv_proj(x).split(256, dim=-1)
        q, k = qk_norm_rope(
            q.view(19, 2, 128), k.view(19, 2, 128), freqs, attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
    for ours, theirs in zip((q, k), seen, strict=True):
        assert same_bytes(ours, theirs[0].transpose(0, 1))

"""The ops' variants for diffusers on the CPU: contracts against what diffusers runs, Triton interpreted, registration, sources."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.gate import _registered as registered_gate
from h3_vortex.kernels.gate import gate
from h3_vortex.kernels.gate_norm_modulate import gate_norm_modulate
from h3_vortex.kernels.qk_norm_rope import _registered as registered_rope
from h3_vortex.kernels.qk_norm_rope import qk_norm_rope
from h3_vortex.kernels.segments import row_map
from h3_vortex.kernels.swiglu import swiglu
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit import nvcc
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, same_bytes_or_nan, seeds
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]
ROWS = row_map(SEGMENTS, 37, "cpu")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@pytest.fixture(scope="module")
def triton_gate():
    with interpreted("gate") as module:
        yield module


@pytest.fixture(scope="module")
def triton_swiglu():
    with interpreted("swiglu") as module:
        yield module


def tensors(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def diffusers_gate(x, other, table):
    return x + table.index_select(0, ROWS.long()) * other


@dtypes
@pytest.mark.parametrize("width", [7, 96])
def test_gate_is_diffusers_statement(dtype, width):
    x, other, table = tensors(dtype, (37, width), (37, width), (6, width))
    expected = diffusers_gate(x, other, table)
    assert gate(x, other, table, ROWS, "twice") is x and same_bytes(x, expected)


def test_the_two_gates_differ():
    x, other, table = tensors(torch.bfloat16, (37, 512), (37, 512), (6, 512))
    assert not same_bytes(gate(x.clone(), other, table, ROWS), gate(x.clone(), other, table, ROWS, "twice"))


@settings(max_examples=25, deadline=None)
@given(patterns, seeds)
def test_gate_in_triton(triton_gate, pool, seed):
    x, other, table = fill(pool, seed, 37, 40), fill(pool, seed + 1, 37, 40), fill(pool, seed + 2, 6, 40)
    expected = diffusers_gate(x, other, table)
    assert same_bytes_or_nan(triton_gate.gate(x.clone(), other, table, ROWS, True), expected)


@dtypes
def test_gate_norm_modulate_is_diffusers_statements(dtype):
    x, other, weight = tensors(dtype, (37, 96), (37, 96), (96,))
    gates, shift, scale = stock.tables(96, "cpu", dtype, 3)
    stream = diffusers_gate(x, other, gates)
    index = ROWS.long()
    normed = torch.nn.functional.rms_norm(stream, weight.shape, weight, 1e-5)
    expected = normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)
    h = gate_norm_modulate(x, other, gates, weight, shift, scale, ROWS, 1e-5, "twice")
    assert same_bytes(h, expected) and same_bytes(x, stream)


@dtypes
def test_swiglu_is_diffusers_statement(dtype):
    (value_gate,) = tensors(dtype, (37, 96))
    value, gated = value_gate.chunk(2, dim=-1)
    expected = value * torch.nn.functional.silu(gated)
    assert same_bytes(swiglu(value_gate, "value_gate"), expected)
    assert same_bytes(swiglu(torch.cat([gated, value], dim=-1)), expected)


@settings(max_examples=25, deadline=None)
@given(patterns, seeds)
def test_swiglu_in_triton_takes_the_other_half(triton_swiglu, pool, seed):
    gate_value = fill(pool, seed, 5, 32)
    value_gate = torch.cat(gate_value.chunk(2, dim=-1)[::-1], dim=-1)
    assert same_bytes_or_nan(triton_swiglu.swiglu(value_gate, True), triton_swiglu.swiglu(gate_value))


@dtypes
@pytest.mark.parametrize("width, half", [(128, 48), (16, 6), (32, 16)])
def test_qk_norm_rope_is_diffusers_functions(dtype, width, half):
    pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")
    from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

    q, k, q_weight, k_weight = tensors(dtype, (37, 3, width), (37, 3, width), (width,), (width,))
    angles = torch.rand(37, half) * 100
    cos, sin = torch.cos(angles), torch.sin(angles)
    freqs = torch.stack([cos, -sin, sin, cos], dim=-1).to(dtype).reshape(1, 37, 1, half, 2, 2)
    expected = [
        _apply_rotary_emb(torch.nn.functional.rms_norm(x[None], w.shape, w, 1e-5), *(torch.cat([t, t], dim=-1) for t in (cos, sin)))[0]
        for x, w in ((q, q_weight), (k, k_weight))
    ]
    assert qk_norm_rope(q, k, freqs, q_weight, k_weight, 1e-5, "torch") == (q, k)
    assert same_bytes(q, expected[0]) and same_bytes(k, expected[1])


def test_no_rows():
    x, weight = torch.empty(0, 64), torch.ones(64)
    table, rows = torch.zeros(6, 64), torch.empty(0, dtype=torch.int32)
    assert gate(x, x.clone(), table, rows, "twice").shape == (0, 64)
    assert gate_norm_modulate(x, x.clone(), table, weight, table, table, rows, 1e-5, "twice").shape == (0, 64)
    assert swiglu(torch.empty(0, 64), "value_gate").shape == (0, 32)
    heads = torch.empty(0, 2, 64)
    assert qk_norm_rope(heads, heads.clone(), torch.empty(1, 0, 1, 8, 2, 2), weight, weight, 1e-5, "torch")[0].shape == (0, 2, 64)


def test_registered_operators_take_the_variant():
    x, other, table = tensors(torch.bfloat16, (37, 64), (37, 64), (6, 64))
    torch.library.opcheck(registered_gate, (x, other, table, ROWS, "twice"))
    q, k, weight = tensors(torch.bfloat16, (37, 2, 32), (37, 2, 32), (32,))
    freqs = stock.rotation_table(37, "cpu", torch.bfloat16)[:, :, :, :16]
    torch.library.opcheck(registered_rope, (q, k, freqs, weight, weight, 1e-5, "torch"))


def test_unknown_variants_are_errors():
    x, table = torch.zeros(37, 64), torch.zeros(6, 64)
    with pytest.raises(ValueError, match="gate: rounding is 'thrice': use once or twice"):
        gate(x, x.clone(), table, ROWS, "thrice")
    with pytest.raises(ValueError, match="swiglu: order is 'gate': use gate_value or value_gate"):
        swiglu(x, "gate")


@pytest.mark.parametrize("name, defines", [
    ("gate", {"N": 5376, "THREADS": 224, "TABLE_F32": False, "GATE_TWICE": True}),
    ("gate", {"N": 5376, "THREADS": 224, "TABLE_F32": False, "GATE_TWICE": True, "FORCE_FMA": True}),
    ("swiglu", {"F": 14336, "THREADS": 224, "VECTORS": 2, "VALUE_FIRST": True}),
    ("norm_modulate", {"N": 5376, "AHEAD": 3, "MIN_BLOCKS": 10, "GATE": True, "TABLE_F32": False, "GATE_TWICE": True}),
    ("qk_norm_rope", {"HEADS": 3, "TORCH_NORM": True}),
], ids=str)  # fmt: skip
def test_sources_compile(name, defines, tmp_path):
    nvcc.check(name, tmp_path, **defines)

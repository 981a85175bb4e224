"""The ops' variants for diffusers on the GPU, byte for byte against the statements that diffusers' blocks run."""

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.gate import OPS as GATES
from h3_vortex.kernels.gate import gate
from h3_vortex.kernels.gate_norm_modulate import gate_norm_modulate
from h3_vortex.kernels.qk_norm_rope import OPS as ROPES
from h3_vortex.kernels.qk_norm_rope import qk_norm_rope
from h3_vortex.kernels.segments import row_map
from h3_vortex.kernels.swiglu import swiglu
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
HIDDEN, FFN, HEADS = 5376, 14336, 56


def rows_of(tokens, device, segments=None):
    return row_map(segments or stock.typical_segments(tokens), tokens, device)


def stock_gate(x, other, table, rows):
    return x.copy_(x + table.index_select(0, rows.long()) * other)


def stock_modulate(h, shift, scale, rows):
    return h * (1.0 + scale.index_select(0, rows.long())) + shift.index_select(0, rows.long())


def stock_rope(q, k, freqs, q_weight, k_weight, eps):
    cos, sin = (torch.cat([t, t], dim=-1)[:, None] for t in (freqs[0, :, 0, :, 0, 0], freqs[0, :, 0, :, 1, 0]))
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        turned = normed[..., : cos.shape[-1]]
        first, second = turned.chunk(2, dim=-1)
        x.copy_(torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, normed[..., cos.shape[-1] :]], dim=-1))
    return q, k


def gate_case(tokens, device, draw, width=HIDDEN, segments=None):
    x, other = draw((tokens, width), device).bfloat16(), draw((tokens, width), device).bfloat16()
    (table,), rows = stock.tables(width, device, torch.bfloat16, 1, draw), rows_of(tokens, device, segments)
    return stock.Case(
        lambda *a: (gate(*a, "twice"),), lambda *a: (stock_gate(*a),), lambda: (x.clone(), other, table, rows), 0)


def norm_case(tokens, device, draw, width=HIDDEN):
    x, other, weight = (draw(shape, device).bfloat16() for shape in ((tokens, width), (tokens, width), (width,)))
    tables, rows = stock.tables(width, device, torch.bfloat16, 3, draw), rows_of(tokens, device)

    def ours(x):
        return gate_norm_modulate(x, other, tables[0], weight, tables[1], tables[2], rows, 1e-5, "twice"), x

    def theirs(x):
        stock_gate(x, other, tables[0], rows)
        return stock_modulate(torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5), tables[1], tables[2], rows), x

    return stock.Case(ours, theirs, lambda: (x.clone(),), 0)


def rope_case(tokens, device, draw, heads=HEADS, eps=1e-5, table=None):
    q, k = (draw((tokens, heads * 128), device).bfloat16() for _ in range(2))
    freqs = stock.rotation_table(tokens, device, torch.bfloat16) if table is None else table
    weights = draw((128,), device).bfloat16(), draw((128,), device).bfloat16()
    return stock.Case(
        lambda *a: qk_norm_rope(*a, "torch"), stock_rope,
        lambda: (q.clone().view(tokens, heads, 128), k.clone().view(tokens, heads, 128), freqs, *weights, eps), 0)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", data.EVERY)
def test_gate(gpu, backend, name):
    data.assert_stock_bytes(gate_case(data.CANONICAL, gpu, data.draw(name)), backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("tokens", data.ROWS)
def test_gate_rows(gpu, backend, tokens):
    data.require_memory(tokens, HIDDEN)
    data.assert_stock_bytes(gate_case(tokens, gpu, data.draw("lognormal"), segments=data.segments(7, tokens)), backend)


def test_gates_differ(gpu):
    """The two roundings must differ somewhere on random bits, or the data sets above prove nothing."""
    x, other, table = (data.finite_bits((4096, 512), gpu) for _ in range(3))
    rows = torch.zeros(4096, dtype=torch.int32, device=gpu)
    assert data.differing([GATES["once"](x.clone(), other, table, rows)], [GATES["twice"](x.clone(), other, table, rows)]) > 0


@pytest.mark.parametrize("name", data.EVERY)
def test_gate_norm_modulate(gpu, name):
    data.assert_stock_bytes(norm_case(data.CANONICAL, gpu, data.draw(name)), "cuda")


@pytest.mark.parametrize("width", [8, 128, 1032, 4096, 8192])
def test_gate_norm_modulate_widths(gpu, width):
    data.assert_stock_bytes(norm_case(3001, gpu, data.draw("lognormal"), width), "cuda")


@pytest.mark.parametrize("name", data.EVERY)
def test_qk_norm_rope(gpu, name):
    data.assert_stock_bytes(rope_case(data.CANONICAL, gpu, data.draw(name)), "cuda")


@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 57])
def test_qk_norm_rope_heads(gpu, heads):
    data.assert_stock_bytes(rope_case(515, gpu, data.draw("lognormal"), heads), "cuda")


@pytest.mark.parametrize("eps", [1e-6, 0.0, 0.5])
def test_qk_norm_rope_eps(gpu, eps):
    data.assert_stock_bytes(rope_case(1000, gpu, data.draw("row_scales"), eps=eps), "cuda")


def test_ropes_differ(gpu):
    args = rope_case(2000, gpu, data.draw("normal"), 8).inputs()
    torch_q, _ = ROPES["torch"](args[0].clone(), args[1].clone(), *args[2:])
    if ROPES["kitchen"].reason("cuda", *args) is not None:
        pytest.skip(f"the other variant does not run here: {ROPES['kitchen'].reason('cuda', *args)}")
    kitchen_q, _ = ROPES["kitchen"](args[0].clone(), args[1].clone(), *args[2:])
    assert data.differing([torch_q], [kitchen_q]) > 0


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", data.EVERY)
def test_swiglu(gpu, backend, name):
    value_gate = data.draw(name)((9_001, 2 * FFN), gpu).bfloat16()

    def theirs(t):
        value, gate = t.chunk(2, dim=-1)
        return (value * torch.nn.functional.silu(gate),)

    data.assert_stock_bytes(stock.Case(lambda t: (swiglu(t, "value_gate"),), theirs, lambda: (value_gate,), 0), backend)

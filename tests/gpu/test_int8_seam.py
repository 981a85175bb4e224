"""The seam on the GPU: our pair through kitchen's GEMM against ``int8_linear`` on the plain input, and what every launch keeps."""

import pytest
import torch
from h3_vortex.benchmarks.int8_cases import OPS, make
from h3_vortex.kernels import int8_seam, norm_modulate_int8, quantize_rotate_int8, stock, swiglu_int8
from h3_vortex.kernels.dispatch import Op
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.gpu import data, int8_data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
ops = pytest.mark.parametrize("op", OPS)
TOKENS, HIDDEN, INNER, FFN, EPS = 4099, 5376, 7168, 14336, 1e-5


@pytest.fixture(scope="module")
def linears(gpu):
    """The four Linears of a block: ``{name: (int8 [N, K], fp32 scales)}`` as kitchen's layout quantises them."""
    from comfy_kitchen.tensor import TensorWiseINT8Layout

    torch.manual_seed(1)
    made = {}
    for name, (n, k) in {"qkv": (21504, HIDDEN), "out_proj": (HIDDEN, INNER), "fc1": (28672, HIDDEN), "fc2": (HIDDEN, FFN)}.items():
        dense = (torch.randn(n, k, device=gpu) * 0.02).bfloat16()
        qdata, params = TensorWiseINT8Layout.quantize(dense, is_weight=True, per_channel=True, convrot=True, convrot_groupsize=256)
        made[name] = (qdata, params.scale)
    return made


def inputs(gpu, name, tokens, gated):
    draw = int8_data.draw(name)
    x, other = (draw((tokens, HIDDEN), gpu).bfloat16() for _ in range(2))
    segments, weight = stock.typical_segments(tokens), int8_data.weight(name, HIDDEN, gpu)
    tables = stock.tables(HIDDEN, gpu, torch.float32, 3)
    return x, other, tables, weight, segments, row_map(segments, tokens, gpu)


def check(pair, plain, weights, act=None):
    assert int8_seam.unavailable_reason() is None and int8_seam.call_reason(plain, weights[0].shape[1]) is None
    got, expected = int8_seam.linear(pair, *weights), int8_seam.stock(plain, *weights, act)
    assert got.dtype == torch.bfloat16 and data.differing([got], [expected]) == 0


sizes = pytest.mark.parametrize(
    ("name", "tokens"), [("lognormal", TOKENS), ("zero_rows", 301), ("specials", 301), ("normal", data.CANONICAL)])


@sizes
def test_qkv(gpu, linears, name, tokens):
    x, _, (shift, scale, _), weight, segments, rows = inputs(gpu, name, tokens, False)
    with data.use_backend("cuda"):
        pair = norm_modulate_int8.norm_modulate_int8(x, weight, shift, scale, rows, EPS)
    check(pair, stock.norm_modulate(x, weight, shift, scale, segments, EPS), linears["qkv"])


@sizes
def test_fc1(gpu, linears, name, tokens):
    x, other, (shift, scale, gate), weight, segments, rows = inputs(gpu, name, tokens, True)
    plain = stock.gate_norm_modulate(x.clone(), other, gate, weight, shift, scale, segments, EPS)
    with data.use_backend("cuda"):
        pair = norm_modulate_int8.gate_norm_modulate_int8(x, other, gate, weight, shift, scale, rows, EPS)
    check(pair, plain, linears["fc1"])


@sizes
def test_out_proj(gpu, linears, name, tokens):
    heads = int8_data.draw(name)((tokens, INNER), gpu).bfloat16()
    with data.use_backend("cuda"):
        pair = quantize_rotate_int8.quantize_rotate_int8(heads)
    check(pair, heads, linears["out_proj"])


@sizes
def test_fc2(gpu, linears, name, tokens):
    gate_up = int8_data.draw(name)((tokens, 2 * FFN), gpu).bfloat16()
    with data.use_backend("cuda"):
        pair = swiglu_int8.swiglu_int8(gate_up)
    check(pair, gate_up, linears["fc2"], "swiglu")


def test_both_routes_give_the_same_bytes(gpu, linears, monkeypatch):
    x = torch.randn(TOKENS, INNER, device=gpu).bfloat16()
    pair = quantize_rotate_int8.quantize_rotate_int8(x)
    expected = int8_seam.linear(pair, *linears["out_proj"])
    monkeypatch.setattr(int8_seam.kitchen(), "_DISABLE_CUTLASS_INT8", True)
    assert data.differing([int8_seam.linear(pair, *linears["out_proj"])], [expected]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_output_dtypes_and_one_scale(gpu, linears, dtype):
    qdata, scales = linears["out_proj"]
    pair = quantize_rotate_int8.quantize_rotate_int8(torch.randn(257, INNER, device=gpu).bfloat16())
    one = scales.flatten()[:1]
    got = int8_seam.linear(pair, qdata, one, dtype)
    assert got.dtype == dtype
    spread = int8_seam.linear(pair, qdata, one.expand(HIDDEN).contiguous(), dtype)
    assert data.differing([got], [spread]) == 0


def test_a_capture_is_refused_and_not_spoiled(gpu, linears):
    pair = quantize_rotate_int8.quantize_rotate_int8(torch.randn(257, INNER, device=gpu).bfloat16())
    x, graph = torch.zeros(4, device=gpu), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
        assert "captured" in int8_seam.call_reason(torch.empty(257, INNER, device=gpu, dtype=torch.bfloat16), INNER)
        with pytest.raises(int8_seam.SeamUnavailable, match="captured"):
            int8_seam.linear(pair, *linears["out_proj"])
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4


def test_side_stream(gpu, linears):
    x = torch.randn(TOKENS, INNER, device=gpu).bfloat16()
    expected = int8_seam.stock(x, *linears["out_proj"])
    late, stream = torch.zeros_like(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        got = int8_seam.linear(quantize_rotate_int8.quantize_rotate_int8(late), *linears["out_proj"])
    stream.synchronize()
    assert data.differing([got], [expected]) == 0


# ---- launches of the four ops ------------------------------------------------------------------------------------------------------
@ops
def test_the_automatic_choice_is_cuda(gpu, op):
    case = make(op, 301, gpu)
    assert data.differing(case.ours(*case.inputs()), case.stock(*case.inputs())) == 0  # the reference is forbidden
    assert "cuda" in {name for name, _ in Op.registry[op]._choices.values()}


@ops
def test_launch_on_a_side_stream(gpu, op):
    case = make(op, 2049, gpu)
    expected, (x,) = case.stock(*case.inputs()), case.inputs()
    case.ours(*case.inputs())
    source, stream = x.clone(), torch.cuda.Stream()
    x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(source)
        got = case.ours(x)
    stream.synchronize()
    assert data.differing(got, expected) == 0


@ops
def test_graph_capture_and_replay(gpu, op):
    case = make(op, 2049, gpu)
    expected, (x,) = case.stock(*case.inputs()), case.inputs()
    source, graph = x.clone(), torch.cuda.CUDAGraph()
    case.ours(x.clone())  # plan and compile before the capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.copy_(source)
        got = case.ours(x)
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert data.differing(got, expected) == 0


@ops
def test_memory_does_not_grow(gpu, op):
    case = make(op, 2049, gpu)
    arguments = case.inputs()
    case.ours(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        case.ours(*arguments)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@ops
def test_no_rows(gpu, op):
    case = make(op, 0, gpu, segments=[(0, 0, 1)])
    got = case.ours(*case.inputs())
    assert got[0].shape[0] == 0 and got[1].shape == (0, 1)


@ops
def test_not_the_current_device(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = make(op, 301, other)
    got = case.ours(*case.inputs())
    with torch.cuda.device(other):
        assert data.differing(got, case.stock(*case.inputs())) == 0


@ops
def test_inputs_are_not_written(gpu, op):
    """Only the gate form's x changes; weights, tables, row map and the residual branch keep their bytes."""
    entry, seen = Op.registry[op], []
    original = entry.check

    def record(*args):
        seen.append({n: (t, t.clone()) for n, t in zip(entry.signature, args, strict=True) if isinstance(t, torch.Tensor)})
        return original(*args)

    entry.check = record
    try:
        entry._choices.clear()
        case = make(op, 301, gpu)
        case.ours(*case.inputs())
    finally:
        entry.check = original
    (arguments,) = seen
    changed = {name for name, (tensor, before) in arguments.items() if not torch.equal(tensor, before)}
    assert changed == ({"x"} if op == "gate_norm_modulate_int8" else set())

"""The three modulation-to-NVFP4 ops on the CPU: references against stock's statements, Triton against them, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import modulate_nvfp4 as op
from h3_vortex.kernels import norm_modulate, nvfp4_quantize, stock
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.kernels.segments import row_map
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit import nvcc
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, same_bytes_or_nan, seeds
from h3_vortex.tests.unit.test_nvfp4_quantize import same, scales, tensor_scale
from hypothesis import given, settings

SEGMENTS = [(0, 5, 1), (5, 5, 3), (5, 6, 0), (6, 37, 2)]
OPS = ("modulate_nvfp4", "norm_modulate_nvfp4", "gate_norm_modulate_nvfp4")
ROWS = row_map(SEGMENTS, 37, "cpu")


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("modulate_nvfp4") as module:
        yield module


def inputs(width=96, dtype=torch.bfloat16, table_dtype=torch.float32):
    torch.manual_seed(0)
    shift, scale, gate = stock.tables(width, "cpu", table_dtype, 3)
    x, other = torch.randn(37, width).to(dtype), torch.randn(37, width).to(dtype)
    return {"x": x, "other": other, "gate": gate, "weight": (1 + torch.randn(width) / 8).to(dtype), "shift": shift, "scale": scale}


def call(name, v, rows=ROWS, scale=None, contract=None):
    tail = v["shift"], v["scale"], rows
    if name == "modulate_nvfp4":
        return op.modulate_nvfp4(v["x"], *tail, scale, contract)
    if name == "norm_modulate_nvfp4":
        return op.norm_modulate_nvfp4(v["x"], v["weight"], *tail, 1e-5, scale, contract)
    return op.gate_norm_modulate_nvfp4(v["x"], v["other"], v["gate"], v["weight"], *tail, 1e-5, scale, contract)


def modulated(name, v, segments=SEGMENTS):
    """Stock's statements up to the quantisation, in place on ``v["x"]`` where stock is."""
    if name == "modulate_nvfp4":
        return stock.modulate(v["x"].clone(), v["shift"], v["scale"], segments)
    if name == "norm_modulate_nvfp4":
        return stock.norm_modulate(v["x"], v["weight"], v["shift"], v["scale"], segments, 1e-5)
    return stock.gate_norm_modulate(v["x"], v["other"], v["gate"], v["weight"], v["shift"], v["scale"], segments, 1e-5)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_reference_is_stock(name, dtype, table_dtype, scale):
    ours, theirs, before = (inputs(dtype=dtype, table_dtype=table_dtype) for _ in range(3))
    got = call(name, ours, scale=tensor_scale(scale))
    assert same(got, stock.quantize_nvfp4(modulated(name, theirs), tensor_scale(scale)))
    assert torch.equal(ours["x"], theirs["x"]) and torch.equal(ours["x"], before["x"]) == (name != "gate_norm_modulate_nvfp4")
    assert all(torch.equal(ours[key], before[key]) for key in before if key != "x")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_cuda_contract_quantises_the_same_values(name, scale):
    ours, theirs = inputs(), inputs()
    expected = nvfp4_quantize.emulate_cuda(modulated(name, theirs), tensor_scale(scale))
    assert same(call(name, ours, scale=tensor_scale(scale), contract="cuda"), expected)


@settings(max_examples=30, deadline=None)
@given(patterns, seeds, scales)
def test_reference_is_stock_for_any_bits(pool, seed, scale):
    h, shift, table = fill(pool, seed, 37, 48), fill(pool, seed + 1, 6, 48), fill(pool, seed + 2, 6, 48)
    expected = stock.quantize_nvfp4(stock.modulate(h.clone(), shift, table, SEGMENTS), tensor_scale(scale))
    before = h.clone()
    assert same(op.modulate_nvfp4(h, shift, table, ROWS, tensor_scale(scale)), expected) and same_bytes(h, before)


@settings(max_examples=40, deadline=None)
@given(patterns, seeds, scales)
def test_triton_is_the_reference_for_any_bits(triton_kernels, pool, seed, scale):
    h, shift, table = fill(pool, seed, 37, 48), fill(pool, seed + 1, 6, 48), fill(pool, seed + 2, 6, 48)
    expected = op.modulate_nvfp4(h, shift, table, ROWS, tensor_scale(scale), "cuda")
    assert same(triton_kernels.modulate_nvfp4(h, shift, table, ROWS, tensor_scale(scale)), expected)


@pytest.mark.parametrize("shape", [(17, 5376), (129, 64)])
@pytest.mark.parametrize("count", [1, 3, 101])
def test_triton_segments(triton_kernels, shape, count):
    tokens, width = shape
    edges = [i * tokens // count for i in range(count + 1)]
    rows = row_map([(a, b, i % 6) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))], tokens, "cpu")
    shift, table = stock.tables(width, "cpu", torch.float32, 2)
    h = torch.randn(shape).bfloat16()
    assert same(triton_kernels.modulate_nvfp4(h, shift, table, rows, None), op.modulate_nvfp4(h, shift, table, rows, None, "cuda"))


def test_triton_strided_rows_and_a_row_per_token(triton_kernels):
    h = torch.randn(21, 3 * 64).bfloat16()[:, 64:128]
    shift, table = stock.tables(64, "cpu", torch.float32, 2)
    rows = row_map([(0, 3, 5), (3, 21, torch.randint(0, 6, (18,)))], 21, "cpu")
    assert same(triton_kernels.modulate_nvfp4(h, shift, table, rows, None), op.modulate_nvfp4(h, shift, table, rows, None, "cuda"))


def test_a_huge_table_does_not_reach_the_padding(triton_kernels):
    """The padding is zero after the modulation, not before: its amax must not see shift or scale."""
    shift = torch.full((1, 64), 1e30).bfloat16()
    h, rows = torch.ones(3, 64).bfloat16(), row_map([(0, 3, 0)], 3, "cpu")
    got = triton_kernels.modulate_nvfp4(h, shift, shift, rows, torch.tensor(1.0))
    assert same(got, op.modulate_nvfp4(h, shift, shift, rows, torch.tensor(1.0), "cuda")) and not got[0][3:].any()


@pytest.mark.parametrize("registered, keys", [
    (op._registered, ("x", "shift", "scale")),
    (op._norm_registered, ("x", "weight", "shift", "scale")),
    (op._gate_norm_registered, ("x", "other", "gate", "weight", "shift", "scale")),
])  # fmt: skip
@pytest.mark.parametrize("scale", [None, 0.01])
def test_registered_ops(registered, keys, scale):
    v = inputs()
    eps = () if registered is op._registered else (1e-5,)
    torch.library.opcheck(registered, (*(v[key] for key in keys), ROWS, *eps, tensor_scale(scale), None))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("scale", [None, 0.01])
def test_compiles_whole(name, scale):
    ours, theirs = inputs(), inputs()
    compiled = torch.compile(lambda x, s: call(name, {**ours, "x": x}, scale=s), backend="eager", fullgraph=True)
    assert same(compiled(ours["x"], tensor_scale(scale)), call(name, theirs, scale=tensor_scale(scale)))
    assert same_bytes_or_nan(ours["x"], theirs["x"])


@pytest.mark.parametrize("name", OPS)
def test_no_tokens(name):
    v = inputs()
    v["x"], v["other"] = v["x"][:0], v["other"][:0]
    q, scale, blocks = call(name, v, row_map([], 0, "cpu"))
    assert q.shape == (0, 48) and scale.item() == 0 and blocks.shape == (0, 8)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("change, words", [
    ({"shift": torch.zeros(6, 8)}, r"shift must be \[R, 96\]"),
    ({"rows": ROWS.long()}, "rows must be int32"),
    ({"tensor_scale": torch.zeros(3)}, "tensor_scale must be one float32 value"),
])  # fmt: skip
def test_what_does_not_fit_is_named(name, change, words):
    change = dict(change)
    rows, scale = change.pop("rows", ROWS), change.pop("tensor_scale", None)
    with pytest.raises(ValueError, match=f"{name}: {words}"):
        call(name, {**inputs(), **change}, rows, scale)


@pytest.mark.parametrize("name", OPS)
def test_an_explicit_backend_raises_on_the_cpu(name):
    with use_backend("cuda"), pytest.raises(BackendUnavailable, match=f"{name}: backend cuda needs"):
        call(name, inputs())


DEFINES = {"K": 5376, "THREADS": 128, "BATCH": 2}
ROW_DEFINES = {"K": 5376, "N": 5376, "AHEAD": norm_modulate.AHEAD, "MIN_BLOCKS": 9}


@pytest.mark.slow
@pytest.mark.parametrize("name, defines", [
    ("modulate_nvfp4", {**DEFINES, "PACK": 0, "DYNAMIC": 1, "NORM": 0, "TABLE_F32": 0}),
    ("modulate_nvfp4", {**DEFINES, "PACK": 1, "DYNAMIC": 0, "NORM": 0, "TABLE_F32": 1}),
    ("modulate_nvfp4", {**DEFINES, "PACK": 1, "DYNAMIC": 1, "NORM": 1, "TABLE_F32": 0}),
    ("norm_modulate_nvfp4", {**ROW_DEFINES, "PACK": 0, "DYNAMIC": 1, "GATE": 1, "TABLE_F32": 0}),
    ("norm_modulate_nvfp4", {**ROW_DEFINES, "PACK": 1, "DYNAMIC": 0, "GATE": 0, "TABLE_F32": 0, "FORCE_SOFTWARE": 1}),
], ids=str)  # fmt: skip
def test_sources_compile(tmp_path, name, defines):
    nvcc.check(name, tmp_path, **defines)

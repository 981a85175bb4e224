"""``nvfp4_quantize`` on the CPU: the eager contract against comfy-kitchen, the CUDA contract against its rules, Triton against both."""

import functools

import comfy_kitchen
import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from h3_vortex.kernels import nvfp4_quantize as op
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit import nvcc
from h3_vortex.tests.unit.bits import fill, patterns, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st

INF, NAN = float("inf"), float("nan")
SHAPES = [(1, 16), (15, 48), (16, 64), (17, 320), (127, 80), (129, 5376), (5, 7168), (3, 14336), (37, 40), (2, 7)]
scales = st.sampled_from([None, 1.0, 0.0009765625, 0.0015, 3.4e-5, 0.0, 1e-39, 1.2e-38, 1e30, 3e38, INF, NAN])
cuda = functools.partial(op.nvfp4_quantize, contract="cuda")


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("nvfp4_quantize") as module:
        yield module


def same(a, b):
    """Equal codes and block scales; equal tensor scales, NaN being NaN."""
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) and x.shape == y.shape and x.dtype == y.dtype
        for x, y in ((a[0], b[0]), (a[2], b[2]))
    ) and torch.equal(a[1].nan_to_num(nan=-1.0), b[1].nan_to_num(nan=-1.0)) and a[1].shape == b[1].shape


def tensor_scale(value):
    return None if value is None else torch.tensor(value, dtype=torch.float32)


def codes(triple):
    q = triple[0].int()
    return torch.stack([q >> 4, q & 15], -1).flatten(1)


def scale_byte(triple, row, block):
    """By the offset formula of the swizzle, written out."""
    flat = triple[2].view(torch.uint8).flatten()
    words = triple[2].shape[1] // 4
    return flat[((row // 128 * words + block // 4) * 32 + row % 32) * 16 + row % 128 // 32 * 4 + block % 4].item()


# ---- the eager contract -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_eager_contract_is_stock(shape, dtype, scale):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    given_scale = tensor_scale(scale)
    got = op.nvfp4_quantize(x, given_scale)
    assert same(got, stock.quantize_nvfp4(x, given_scale)) and torch.equal(x, before)
    assert scale is None or got[1] is given_scale


@settings(max_examples=60, deadline=None)
@given(patterns, seeds, scales)
def test_eager_contract_is_stock_for_any_bits(pool, seed, scale):
    x = fill(pool, seed, 5, 48)
    assert same(op.nvfp4_quantize(x, tensor_scale(scale)), stock.quantize_nvfp4(x, tensor_scale(scale)))


def test_a_strided_view_is_quantised_as_its_copy():
    x = torch.randn(20, 96).bfloat16()[:, 32:64]
    assert same(op.nvfp4_quantize(x), stock.quantize_nvfp4(x.contiguous()))


@pytest.mark.parametrize("shape", [(37, 320), (16, 64), (5, 40)])
@pytest.mark.parametrize("scale", [None, 0.002])
def test_as_quantized_is_from_float(shape, scale):
    x = torch.randn(shape).bfloat16()
    expected = QuantizedTensor.from_float(x, op.LAYOUT, scale=tensor_scale(scale))
    got = op.as_quantized(op.nvfp4_quantize(x, tensor_scale(scale)), x.dtype, x.shape)
    assert type(got) is type(expected) and type(got._params) is type(expected._params) and repr(got) == repr(expected)
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.device == expected.device
    names, context = got.__tensor_flatten__()
    expected_names, expected_context = expected.__tensor_flatten__()
    assert names == expected_names and context == expected_context
    assert all(torch.equal(getattr(got, n).view(torch.uint8), getattr(expected, n).view(torch.uint8)) for n in names if n != "_param_scale")
    assert torch.equal(got._params.scale, expected._params.scale) and torch.equal(got.dequantize(), expected.dequantize())


def test_as_quantized_takes_the_host_s_own_layout(monkeypatch):
    """ComfyUI registers its subclass under kitchen's name."""
    layouts = comfy_kitchen.tensor.base.LAYOUTS
    own = type("Own", (layouts[op.LAYOUT],), {"Params": type("Params", (layouts[op.LAYOUT].Params,), {})})
    monkeypatch.setitem(layouts, op.LAYOUT, own)
    x = torch.randn(16, 64).bfloat16()
    assert type(op.as_quantized(op.nvfp4_quantize(x), x.dtype, x.shape)._params) is own.Params


# ---- which contract ---------------------------------------------------------------------------------------------------------------


def test_the_contract_follows_kitchen_s_registry(monkeypatch):
    registry = comfy_kitchen.registry
    assert op.stock_contract(torch.device("cpu")) == registry.get_capable_backend(
        "quantize_nvfp4", {"x": torch.zeros(16, 16, dtype=torch.bfloat16), "per_tensor_scale": torch.ones(())}
    ) == "eager"
    x = -torch.zeros(16, 64, dtype=torch.bfloat16)  # signed zeros tell the backends apart
    assert (op.nvfp4_quantize(x, contract="cuda")[0] == 0x88).all() and not (op.nvfp4_quantize(x)[0] == 0x88).any()
    monkeypatch.setattr(op, "_capable", lambda device, dtype, enabled: "cuda")
    assert (op.nvfp4_quantize(x)[0] == 0x88).all()


def test_a_changed_registry_is_noticed(monkeypatch):
    calls = op._capable.cache_info
    op._capable.cache_clear()  # an earlier test of this process may have seen both states
    monkeypatch.setattr(comfy_kitchen.registry, "is_available", lambda name: name == "eager")
    op.stock_contract(torch.device("cpu"))
    op.stock_contract(torch.device("cpu"))
    assert calls().misses == 1
    monkeypatch.setattr(comfy_kitchen.registry, "is_available", lambda name: name in ("triton", "eager"))
    op.stock_contract(torch.device("cpu"))
    assert calls().misses == 2


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_fast_backends_refuse_the_eager_contract(backend):
    arguments = {"x": torch.zeros(1, 16), "contract": "eager"}
    assert "cuda contract" in next(rule.text for rule in op.OP.backends[backend].constraints.rules if not rule.holds(arguments))


# ---- the rules of the cuda contract -----------------------------------------------------------------------------------------------


def test_e2m1_rounds_to_nearest_even():
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert op.e2m1_codes(grid).tolist() == list(range(8)) and op.e2m1_codes(-grid).tolist() == [c + 8 for c in range(8)]
    for low, midpoint in enumerate(((grid[:-1] + grid[1:]) / 2).tolist()):
        middle = torch.tensor(midpoint)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(INF))
        even = low if low % 2 == 0 else low + 1
        assert op.e2m1_codes(torch.stack([below, middle, above])).tolist() == [low, even, low + 1]
    assert op.e2m1_codes(torch.tensor([7.0, INF, -INF, 1e-45, -1e-45, NAN, -NAN])).tolist() == [7, 7, 15, 0, 8, 7, 7]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_e2m1_is_kitchen_s_for_numbers(values):
    y = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(op.e2m1_codes(y), comfy_kitchen.float_utils._f32_to_floatx_unpacked(y, 2, 1))


def test_zero_tensors_keep_their_signs():
    for zero, byte in ((0.0, 0x00), (-0.0, 0x88)):
        got = cuda(torch.full((17, 64), zero, dtype=torch.bfloat16))
        assert got[1].item() == 0 and (got[0][:17] == byte).all() and (got[0][17:] == 0).all()
        assert [scale_byte(got, row, 0) for row in (0, 16, 17, 31, 32, 127)] == [0x7E] * 4 + [0, 0]


def test_a_block_whose_scale_underflows_packs_sixes():
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[0, 0] = 1e-6
    x[0, 1] = -1e-6
    got = cuda(x, torch.tensor(1.0))
    assert scale_byte(got, 0, 0) == 0 and codes(got)[0, :4].tolist() == [7, 15, 0, 0]


def test_nan_is_ignored_by_scales_and_becomes_six():
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[0, :16] = torch.tensor([NAN, 6.0, -6.0, -NAN] + [1.0] * 12)
    x[1, :16] = NAN
    x[2, 0], x[2, 1] = INF, -INF
    got = cuda(x, torch.tensor(1.0))
    assert scale_byte(got, 0, 0) == 0x38 and codes(got)[0, :5].tolist() == [7, 7, 15, 7, 2]
    assert scale_byte(got, 1, 0) == 0x7E and (codes(got)[1, :16] == 7).all()
    assert scale_byte(got, 2, 0) == 0x7E and codes(got)[2, :3].tolist() == [7, 15, 0]


def test_even_columns_are_high_nibbles_and_scales_are_swizzled():
    x = torch.zeros(200, 192, dtype=torch.bfloat16)
    powers = torch.exp2(((torch.arange(200)[:, None] * 5 + torch.arange(12)[None, :] * 3) % 13 - 6).float())
    x.view(200, 12, 16)[:, :, 1] = (6 * powers).bfloat16()
    got = cuda(x, torch.tensor(1.0))
    assert (got[0][:200, 0::8] == 0x07).all()  # column 1 of each block
    for row in (0, 1, 31, 32, 127, 128, 199):
        for block in range(12):
            assert scale_byte(got, row, block) == 0x38 + 8 * int(torch.log2(powers[row, block]))
    tail = got[2].view(torch.uint8).flatten()
    assert tail.numel() == 256 * 12 and int((tail != 0).sum()) == 200 * 12


def test_the_dynamic_scale_is_rounded_to_bf16():
    x = torch.full((16, 64), 1.01).bfloat16()
    got = cuda(x)
    assert got[1] == torch.tensor(x[0, 0].item() / 2688).bfloat16().float() and scale_byte(got, 0, 0) == 0x7E


def test_contracts_agree_where_the_arithmetic_is_exact():
    """Values on the E2M1 grid under powers of two: no rounding anywhere, so true division and reciprocal give the same bytes."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -3.0, -6.0])
    x = grid[torch.randint(0, len(grid), (130, 320), generator=generator)]
    x[:, ::16] = 6.0
    x = (x * torch.exp2(torch.randint(-3, 6, (130, 20), generator=generator).float()).repeat_interleave(16, 1)).bfloat16()
    scale = torch.tensor(0.25)
    assert same(cuda(x, scale), stock.quantize_nvfp4(x, scale))


# ---- Triton -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(patterns, seeds, scales)
@example([0x0000], 0, None)
@example([0x8000], 0, None)
@example([0x7FC0, 0xFFC1], 0, 1.0)
@example([0x0001, 0x8001], 0, 1e-39)
def test_triton_is_the_reference_for_any_bits(triton_kernels, pool, seed, scale):
    x = fill(pool, seed, 19, 80)
    assert same(triton_kernels.nvfp4_quantize(x, tensor_scale(scale)), cuda(x, tensor_scale(scale)))


@pytest.mark.parametrize("shape", [(1, 5376), (17, 5376), (3, 7168), (2, 14336), (129, 16), (145, 64), (16, 1008)])
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_triton_is_the_reference_for_shapes(triton_kernels, shape, scale):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp2(torch.randint(-30, 10, (shape[0], 1)).float())).bfloat16()
    assert same(triton_kernels.nvfp4_quantize(x, tensor_scale(scale)), cuda(x, tensor_scale(scale)))


def test_triton_with_every_finite_value_and_midpoint(triton_kernels):
    """All finite bf16 under g = 1: every block scale, and E2M1 midpoints in blocks led by a 6."""
    bits = torch.arange(65_536, dtype=torch.int32)
    x = torch.where((bits & 0x7F80) == 0x7F80, 0, bits).to(torch.int16).view(torch.bfloat16).view(256, 256).clone()
    middles = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.0]).bfloat16()
    x[::5, :16] = middles
    for scale in (1.0, 0.00146484375, 0.0015):
        assert same(triton_kernels.nvfp4_quantize(x, torch.tensor(scale)), cuda(x, torch.tensor(scale)))


def test_triton_strided_rows(triton_kernels):
    x = torch.randn(21, 3 * 64).bfloat16()[:, 64:128]
    assert same(triton_kernels.nvfp4_quantize(x, None), cuda(x))


# ---- the op -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("contract", [None, "cuda"])
def test_registered_op(scale, contract):
    torch.library.opcheck(op._registered, (torch.randn(5, 32).bfloat16(), tensor_scale(scale), contract))


@pytest.mark.parametrize("scale", [None, 0.01])
def test_compiles_whole(scale):
    x, given_scale = torch.randn(5, 32).bfloat16(), tensor_scale(scale)
    compiled = torch.compile(lambda t, s: op.nvfp4_quantize(t, s), backend="eager", fullgraph=True)
    assert same(compiled(x, given_scale), op.nvfp4_quantize(x, given_scale))


@pytest.mark.parametrize("contract", ["eager", "cuda"])
def test_no_tokens(contract):
    q, scale, blocks = op.nvfp4_quantize(torch.empty(0, 64, dtype=torch.bfloat16), None, contract)
    assert q.shape == (0, 32) and scale.item() == 0 and blocks.shape == (0, 4) and blocks.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("x, scale, words", [
    (torch.zeros(4), None, r"x must be \[S, K\]"),
    (torch.zeros(4, 16), torch.zeros(2), "tensor_scale must be one float32 value"),
    (torch.zeros(4, 16), torch.zeros((), dtype=torch.bfloat16), "tensor_scale must be one float32 value"),
])  # fmt: skip
def test_what_does_not_fit_is_named(x, scale, words):
    with pytest.raises(ValueError, match=words):
        op.nvfp4_quantize(x, scale)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_an_explicit_backend_raises_on_the_cpu(backend):
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    with use_backend(backend), pytest.raises(BackendUnavailable, match=f"nvfp4_quantize: backend {backend} needs"):
        op.nvfp4_quantize(x)
    assert op.OP.choose(x, None, "cuda") == "eager"


def test_rules_of_the_cuda_backend():
    def failing(x, contract="cuda"):
        arguments = {"x": x, "contract": contract}
        return next((rule.text for rule in op.OP.backends["cuda"].constraints.rules if not rule.holds(arguments)), None)

    buffer = torch.empty(4, 512, dtype=torch.bfloat16)
    assert failing(buffer) is None and failing(buffer[:, 128:256]) is None
    assert "multiple of 16" in failing(buffer[:, :24]) and "16-byte aligned" in failing(buffer[:, 4:4 + 32])
    assert "another comfy-kitchen backend" in failing(buffer, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("pack, dynamic, software", [(0, 1, 0), (1, 1, 0), (1, 0, 1)])
def test_source_compiles(tmp_path, pack, dynamic, software):
    nvcc.check("nvfp4_quantize", tmp_path, K=7168, THREADS=128, BATCH=4, PACK=pack, DYNAMIC=dynamic, FORCE_SOFTWARE=software)

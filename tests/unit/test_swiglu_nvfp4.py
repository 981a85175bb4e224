"""``swiglu_nvfp4`` on the CPU: reference against stock's statements, Triton against the reference, registration, errors."""

import pytest
import torch
from h3_vortex.kernels import nvfp4_quantize, stock
from h3_vortex.kernels import swiglu_nvfp4 as op
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.tests.triton_cpu import interpreted
from h3_vortex.tests.unit import nvcc
from h3_vortex.tests.unit.bits import fill, patterns, same_bytes, seeds
from h3_vortex.tests.unit.test_nvfp4_quantize import same, scales, tensor_scale
from hypothesis import given, settings


@pytest.fixture(scope="module")
def triton_kernels():
    with interpreted("swiglu_nvfp4") as module:
        yield module


@pytest.mark.parametrize("shape", [(37, 192), (1, 32), (16, 128), (5, 14)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [None, 0.0015])
def test_reference_is_stock(shape, dtype, scale):
    torch.manual_seed(0)
    gate_up = torch.randn(shape).to(dtype)
    before = gate_up.clone()
    got = op.swiglu_nvfp4(gate_up, tensor_scale(scale))
    assert same(got, stock.quantize_nvfp4(stock.swiglu(gate_up), tensor_scale(scale))) and torch.equal(gate_up, before)


@settings(max_examples=30, deadline=None)
@given(patterns, seeds, scales)
def test_reference_is_stock_for_any_bits(pool, seed, scale):
    gate_up = fill(pool, seed, 7, 96)
    assert same(op.swiglu_nvfp4(gate_up, tensor_scale(scale)), stock.quantize_nvfp4(stock.swiglu(gate_up), tensor_scale(scale)))
    expected = nvfp4_quantize.emulate_cuda(stock.swiglu(gate_up), tensor_scale(scale))
    assert same(op.swiglu_nvfp4(gate_up, tensor_scale(scale), "cuda"), expected)


@settings(max_examples=40, deadline=None)
@given(patterns, seeds, scales)
def test_triton_is_the_reference_for_any_bits(triton_kernels, pool, seed, scale):
    gate_up = fill(pool, seed, 19, 160)
    expected = op.swiglu_nvfp4(gate_up, tensor_scale(scale), "cuda")
    assert same(triton_kernels.swiglu_nvfp4(gate_up, tensor_scale(scale)), expected)


@pytest.mark.parametrize("shape", [(3, 28672), (130, 96)])
@pytest.mark.parametrize("scale", [None, 0.002])
def test_triton_is_the_reference_for_shapes(triton_kernels, shape, scale):
    torch.manual_seed(0)
    buffer = torch.randn(shape[0], shape[1] + 32).bfloat16()
    gate_up = buffer[:, 16:-16]
    expected = op.swiglu_nvfp4(gate_up, tensor_scale(scale), "cuda")
    assert same(triton_kernels.swiglu_nvfp4(gate_up, tensor_scale(scale)), expected)


@pytest.mark.parametrize("scale", [None, 0.01])
def test_registered_op(scale):
    torch.library.opcheck(op._registered, (torch.randn(5, 64).bfloat16(), tensor_scale(scale), None))


@pytest.mark.parametrize("scale", [None, 0.01])
def test_compiles_whole(scale):
    gate_up = torch.randn(5, 64).bfloat16()
    compiled = torch.compile(lambda t, s: op.swiglu_nvfp4(t, s), backend="eager", fullgraph=True)
    before = gate_up.clone()
    assert same(compiled(gate_up, tensor_scale(scale)), op.swiglu_nvfp4(gate_up, tensor_scale(scale))) and same_bytes(gate_up, before)


def test_no_tokens():
    q, scale, blocks = op.swiglu_nvfp4(torch.empty(0, 64, dtype=torch.bfloat16))
    assert q.shape == (0, 16) and scale.item() == 0 and blocks.shape == (0, 4)


@pytest.mark.parametrize("gate_up, scale, words", [
    (torch.zeros(5, 3), None, r"gate_up must be \[S, 2F\]"),
    (torch.zeros(2, 5, 4), None, r"gate_up must be \[S, 2F\]"),
    (torch.zeros(2, 64), torch.zeros(2), "tensor_scale must be one float32 value"),
])  # fmt: skip
def test_what_does_not_fit_is_named(gate_up, scale, words):
    with pytest.raises(ValueError, match=f"swiglu_nvfp4: {words}"):
        op.swiglu_nvfp4(gate_up, scale)


def test_an_explicit_backend_raises_on_the_cpu():
    with use_backend("cuda"), pytest.raises(BackendUnavailable, match="swiglu_nvfp4: backend cuda needs"):
        op.swiglu_nvfp4(torch.zeros(16, 64, dtype=torch.bfloat16))


def test_rules_of_the_cuda_backend():
    def failing(gate_up, contract="cuda"):
        arguments = {"gate_up": gate_up, "contract": contract}
        return next((rule.text for rule in op.OP.backends["cuda"].constraints.rules if not rule.holds(arguments)), None)

    buffer = torch.empty(4, 512, dtype=torch.bfloat16)
    assert failing(buffer) is None and "multiple of 32" in failing(buffer[:, :48]) and "16-byte aligned" in failing(buffer[:, 4:68])
    assert "another comfy-kitchen backend" in failing(buffer, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name, defines", [
    ("swiglu_nvfp4", {"K": 14336, "THREADS": 128, "BATCH": 2, "PACK": 0, "DYNAMIC": 1, "FAST_SILU": 1}),
    ("swiglu_nvfp4", {"K": 14336, "THREADS": 128, "BATCH": 2, "PACK": 1, "DYNAMIC": 1, "FAST_SILU": 0}),
    ("fast_silu", {}),
], ids=str)  # fmt: skip
def test_sources_compile(tmp_path, name, defines):
    nvcc.check(name, tmp_path, **defines)

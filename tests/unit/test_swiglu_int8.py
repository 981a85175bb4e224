"""The folded SwiGLU contract: exact where the chip's two approximations are exact, bounded elsewhere; nothing rounded in between."""

import math

import pytest
import torch
from h3_vortex.kernels import quantize_rotate_int8, swiglu_int8
from h3_vortex.kernels.swiglu_int8 import activation


def pair(seed, rows=8, columns=512):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).bfloat16(), torch.randn(rows, columns, generator=generator).bfloat16()


def test_saturated_gates_leave_the_product():
    """silu is the identity above 18, and zero at 0 and below -88, in whatever precision: there the bytes are those of the plain product."""
    gate, up = pair(0)
    gate = torch.where(gate > 0, gate.abs() * 40 + 18, torch.where(gate > -0.5, torch.zeros_like(gate), gate * 40 - 88)).bfloat16()
    product = gate.float().clamp(min=0) * up.float()
    expected = quantize_rotate_int8.quantize(quantize_rotate_int8.rotate(product))
    q, scale = swiglu_int8.reference(torch.cat([gate, up], 1))
    assert torch.equal(q, expected[0]) and torch.equal(scale, expected[1])


def test_activation_is_silu_in_double_precision():
    gate, up = (t.float() for t in pair(1, 64))
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    ulp = torch.finfo(torch.float32).eps
    # rounding of -gate * log2(e), amplified by its size, then exp2, sum, quotient and product: half a unit each
    bound = exact.abs() * ulp * (0.5 * gate.double().abs() * math.log2(math.e) * math.log(2) + 2.5)
    assert ((activation(gate, up).double() - exact).abs() <= bound).all()


def test_nothing_is_rounded_to_bf16_before_the_rotation():
    """Eager ``silu(gate) * up`` in bf16 in front of the quantiser is another function."""
    gate, up = pair(2, 64)
    eager = quantize_rotate_int8.reference(torch.nn.functional.silu(gate) * up)
    ours = swiglu_int8.reference(torch.cat([gate, up], 1))
    assert (eager[0] != ours[0]).any() and not torch.equal(eager[1], ours[1])


@pytest.mark.parametrize(("gate", "up", "expected"), [
    (-100.0, 3.0, -0.0), (-math.inf, 3.0, math.nan), (math.inf, 3.0, math.inf), (math.inf, 0.0, math.nan), (math.nan, 1.0, math.nan),
    (0.0, math.inf, math.nan), (2.0**-130, 1.0, 0.0), (20.0, 1.5, 30.0), (-87.9, 1e38, -0.0),
])
def test_special_values(gate, up, expected):
    got = activation(torch.tensor([gate]), torch.tensor([up])).item()
    assert math.isnan(got) if math.isnan(expected) else (got == expected and math.copysign(1, got) == math.copysign(1, expected))


def test_strided_and_empty():
    wide = torch.randn(5, 2048, generator=torch.Generator().manual_seed(3)).bfloat16()
    got, expected = swiglu_int8.swiglu_int8(wide[:, 512:1536]), swiglu_int8.reference(wide[:, 512:1536].contiguous())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    q, scale = swiglu_int8.swiglu_int8(wide[:0])
    assert q.shape == (0, 1024) and scale.shape == (0, 1)


@pytest.mark.parametrize(("gate_up", "words"), [
    (torch.zeros(4, 300, dtype=torch.bfloat16), "got 150"),
    (torch.zeros(4, 513, dtype=torch.bfloat16), "2F"),
    (torch.zeros(4, 512), "bfloat16"),
])
def test_what_fits_no_backend_is_refused(gate_up, words):
    with pytest.raises(ValueError, match=words):
        swiglu_int8.swiglu_int8(gate_up)


def test_registered_op_agrees_with_its_fake():
    torch.library.opcheck(
        torch.ops.h3_vortex.swiglu_int8.default, (torch.randn(3, 1024).bfloat16(),), test_utils=("test_schema", "test_faketensor"))

"""The rotate-and-quantise contract: an independent scalar emulation, exact rotations, and what special rows give. Bytes throughout."""

import math
import struct

import pytest
import torch
from h3_vortex.kernels import quantize_rotate_int8 as module
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.kernels.quantize_rotate_int8 import quantize_rotate_int8
from hypothesis import given, settings
from hypothesis import strategies as st


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


# ---- the contract once more, one number at a time, on Python floats and the struct module ----------------------------------------
def fp32(value):
    """Nearest fp32 of a double (overflow to infinity), subnormals to zero of their sign. Exact sums of two fp32 fit: see below."""
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    return math.copysign(0.0, rounded) if abs(rounded) < 2.0**-126 else rounded


def bf16(value):
    if math.isnan(value):
        return value
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", word))[0]


def scalar_row(row):
    """``(codes, scale)`` of one bf16 row given as floats. Sums of two fp32 in a double round once more at most in the 54th bit; a
    double-rounding error would need a sum within 2**-53 of a rounding boundary, which the rows used here do not have."""
    x = [fp32(v) for v in row]
    for start in range(0, len(x), 256):
        for stride in (1, 4, 16, 64):
            for i in range(256):
                if (i // stride) % 4 == 0:
                    at = [start + i + k * stride for k in range(4)]
                    x0, x1, x2, x3 = (x[j] for j in at)
                    negated = fp32(-x0 + x1)
                    sums = (
                        fp32(fp32(fp32(x0 + x1) + x2) - x3), fp32(fp32(fp32(x0 + x1) - x2) + x3),
                        fp32(fp32(fp32(x0 - x1) + x2) + x3), fp32(fp32(negated + x2) + x3),
                    )  # fmt: skip
                    for j, total in zip(at, sums, strict=True):
                        x[j] = fp32(total * 0.5)
    amax = max((abs(v) for v in x if not math.isnan(v)), default=0.0)
    scale = max(fp32(min(amax, 3.3895313892515355e38) * fp32(1.0 / 127.0)), fp32(1.0e-30))
    codes = []
    for v in x:
        quotient = bf16(v) / bf16(scale)
        quotient = bf16(fp32(quotient)) if math.isfinite(quotient) else quotient
        if math.isnan(quotient):
            codes.append(-128)
        else:
            clamped = max(-128.0, min(127.0, quotient))
            codes.append(round(clamped))  # Python rounds half to even
    return codes, scale


def rows_of(kind, generator):
    x = torch.randn(2, 512, generator=generator)
    if kind == "ties":
        x = torch.randint(-3, 4, (2, 512), generator=generator).float()
    elif kind == "one_hot":
        x = torch.zeros(2, 512)
        x[0, 3], x[1, 300] = 5.0, -0.75
    elif kind == "tiny":
        x = x * 2.0**-124
    elif kind == "tail":
        x = x * torch.exp(3 * torch.randn(2, 512, generator=generator))
    elif kind == "infinite":
        x[0, 7], x[1, 300] = math.inf, -math.inf
    elif kind == "nan":
        x[0, 7], x[1, ::3] = math.nan, math.nan
    elif kind == "huge":
        x = x.clamp(-3, 3) * 1e38
    elif kind == "negative_zero":
        x = x * 0.0
    return x.bfloat16()


@pytest.mark.parametrize("kind", ["normal", "ties", "one_hot", "tiny", "tail", "infinite", "nan", "huge", "negative_zero"])
def test_reference_is_the_contract_number_by_number(kind):
    x = rows_of(kind, torch.Generator().manual_seed(3))
    q, scale = module.reference(x)
    for row in range(2):
        codes, expected = scalar_row(x[row].float().tolist())
        assert q[row].tolist() == codes
        assert scale[row].item() == expected


def test_rotation_is_kitchens_hadamard_matrix():
    """Small integers keep every sum exact, so a product with the matrix must agree to the bit."""
    from comfy_kitchen.tensor.int8_utils import _build_hadamard

    x = torch.randint(-100, 101, (64, 768), generator=torch.Generator().manual_seed(0)).float()
    h = _build_hadamard(256, dtype=torch.float64)
    assert torch.equal(module.rotate(x), (x.double().view(64, 3, 256) @ h).view(64, 768).float())


def test_kitchens_eager_quantiser_gives_other_bytes():
    """Why the contract is the CUDA kernel: the bf16 matrix product rounds elsewhere (and production on a CPU takes the stock Linear)."""
    from comfy_kitchen.backends.eager.quantization import quantize_and_rotate_rowwise
    from comfy_kitchen.tensor.int8_utils import _build_hadamard

    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, scale = quantize_and_rotate_rowwise(x, _build_hadamard(256, dtype=torch.bfloat16), 256)
    ours, ours_scale = module.reference(x)
    assert 0 < (q != ours).sum() < q.numel() // 5 and not torch.equal(scale.view(-1), ours_scale.view(-1))


def test_zero_rows_have_the_smallest_scale():
    x = torch.zeros(3, 256, dtype=torch.bfloat16)
    x[1] = -0.0
    q, scale = module.reference(x)
    assert not q.any() and torch.equal(scale, torch.full((3, 1), 1e-30))


def test_codes_reach_both_ends():
    q, _ = module.reference(torch.randn(512, 512, generator=torch.Generator().manual_seed(2)).bfloat16())
    assert q.min() == -128 and q.max() == 127


def test_a_row_of_nan_is_all_minus_128():
    q, scale = module.reference(torch.full((1, 256), math.nan, dtype=torch.bfloat16))
    assert (q == -128).all() and scale.item() == torch.tensor(1e-30).item()


def test_approximate_division_cannot_show():
    """Every quotient of two bf16 significands is rounded to the same bf16 by a reciprocal that is off by four units in the last place."""
    v = (torch.arange(128, 256).float() / 128).view(-1, 1)
    s = (torch.arange(128, 256).float() / 128).view(1, -1)
    exact = (v / s).bfloat16()
    inverse = 1.0 / s
    for step in (-4, -1, 0, 1, 4):
        off = (inverse.view(torch.int32) + step).view(torch.float32)
        assert torch.equal(bits((v * off).bfloat16()), bits(exact))


@settings(max_examples=25, deadline=None)
@given(st.integers(-60, 60), st.integers(0, 2**31))
def test_powers_of_two_scale_the_scale_alone(exponent, seed):
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    q, scale = module.reference(x)
    q2, scale2 = module.reference(x * 2.0**exponent)
    assert torch.equal(q, q2) and torch.equal(scale * 2.0**exponent, scale2)


def test_rows_are_independent_of_each_other(monkeypatch):
    x = torch.randn(11, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = module.reference(x)
    monkeypatch.setattr(module, "_REFERENCE_ROWS", 4)
    assert same(module.reference(x), whole)
    assert same(module.reference(x[3:4]), [t[3:4] for t in whole])


def test_strided_rows_and_no_rows():
    wide = torch.randn(5, 1024, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert same(quantize_rotate_int8(wide[:, 256:768]), module.reference(wide[:, 256:768].contiguous()))
    q, scale = quantize_rotate_int8(wide[:0, :512])
    assert q.shape == (0, 512) and scale.shape == (0, 1)


@pytest.mark.parametrize(("x", "words"), [
    (torch.zeros(4, 300, dtype=torch.bfloat16), "multiple of 256 from 256 to 16384, got 300"),
    (torch.zeros(4, 16640, dtype=torch.bfloat16), "got 16640"),
    (torch.zeros(4, 256), "bfloat16"),
    (torch.zeros(2, 4, 256, dtype=torch.bfloat16), r"\[2, 4, 256\]"),
])
def test_what_fits_no_backend_is_refused(x, words):
    with pytest.raises(ValueError, match=words):
        quantize_rotate_int8(x)


def test_cuda_is_refused_with_its_reason_here():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with use_backend("cuda"), pytest.raises(BackendUnavailable, match="quantize_rotate_int8: backend cuda needs an NVIDIA GPU"):
        quantize_rotate_int8(torch.zeros(4, 256, dtype=torch.bfloat16))


def test_registered_op_agrees_with_its_fake():
    torch.library.opcheck(
        torch.ops.h3_vortex.quantize_rotate_int8.default, (torch.randn(3, 512).bfloat16(),), test_utils=("test_schema", "test_faketensor"))

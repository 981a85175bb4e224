"""The references of the INT8 ops against bytes that comfy-kitchen's CUDA kernels gave on a GPU (``tests/gpu/make_int8_fixtures.py``)."""

from pathlib import Path

import pytest
import torch
from h3_vortex.kernels import gate_norm_modulate, norm_modulate, quantize_rotate_int8, swiglu_int8
from h3_vortex.kernels.segments import row_map

FILE = Path(__file__).resolve().parent / "data" / "int8_convrot.safetensors"


@pytest.fixture(scope="module")
def recorded():
    from safetensors.torch import load_file

    if not FILE.is_file():
        pytest.fail(f"{FILE} is missing: restore it from git, or record it on a GPU with tests/gpu/make_int8_fixtures.py")
    return load_file(FILE)


def assert_pair(got, q, scale):
    assert torch.equal(got[0], q) and torch.equal(got[1].view(torch.int32), scale.view(torch.int32))


def test_rotate_and_quantise(recorded):
    assert_pair(quantize_rotate_int8.reference(recorded["rotate.x"]), recorded["rotate.q"], recorded["rotate.scale"])


@pytest.mark.parametrize("form", ["norm", "gated"])
def test_modulated_rows(recorded, form):
    """From stock's own modulated rows, so that the CPU's norm does not come in."""
    assert_pair(quantize_rotate_int8.reference(recorded[f"{form}.h"]), recorded[f"{form}.q"], recorded[f"{form}.row_scale"])


def test_swiglu_where_the_chip_is_exact(recorded):
    assert_pair(swiglu_int8.reference(recorded["saturated.gate_up"]), recorded["saturated.q"], recorded["saturated.scale"])


def test_swiglu_elsewhere(recorded):
    """Scales within the error of the two approximations, codes within one step of the recorded ones."""
    gate_up = recorded["swiglu.gate_up"]
    q, scale = swiglu_int8.reference(gate_up)
    activation = swiglu_int8.activation(*gate_up.float().chunk(2, dim=1))
    groups = activation.abs().view(activation.shape[0], -1, 256).sum(2).amax(1, keepdim=True) / 16
    # 5 units in the last place per value, 12 sums of half a unit each in either computation
    bound = groups * (5 + 12) * 2.0**-23 / 127
    ordinary = bound.isfinite() & (bound < 1e30)
    assert ordinary.sum() > 20
    assert ((scale - recorded["swiglu.scale"]).abs() <= bound)[ordinary].all()
    off = (q.int() - recorded["swiglu.q"].int()).abs()[ordinary.expand_as(q)]
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3


def test_norm_rows_are_the_cpus_up_to_its_own_order(recorded):
    """The CPU's norm sums in another order, which moves few elements after the rounding to bf16."""
    segments = recorded["norm.segments"].tolist()
    rows = row_map(segments, recorded["norm.x"].shape[0], "cpu")
    x = recorded["norm.x"].clone()
    tables = recorded["norm.shift"], recorded["norm.scale"]
    plain = norm_modulate.reference(x, recorded["norm.weight"], *tables, rows, 1e-5)
    gated = gate_norm_modulate.reference(x, recorded["norm.other"], recorded["norm.gate"], recorded["norm.weight"], *tables, rows, 1e-5)
    for got, expected in ((plain, recorded["norm.h"]), (gated, recorded["gated.h"])):
        assert (got == expected)[expected.isfinite()].float().mean() > 0.99

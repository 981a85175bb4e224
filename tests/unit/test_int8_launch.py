"""What the CUDA plans of the INT8 ops hand to a launch, against the parameter lists of the sources. No GPU: the kernel is a recorder."""

import re
import struct

import pytest
import torch
from h3_vortex.kernels import norm_modulate_int8, nvrtc, quantize_rotate_int8, swiglu_int8
from h3_vortex.kernels.segments import row_map

KINDS = {"P": r"\*", "q": "i64 ", "f": "float ", "i": "int "}


@pytest.fixture
def launches(monkeypatch):
    """Replaces ``nvrtc.kernel``; every launch is packed as the driver would get it and returned as ``{parameter: value}``."""
    seen = []

    class Recorder:
        def __init__(self, name, parameters, index, options=(), **defines):
            source = (nvrtc.CSRC / f"{name}.cu").read_text(encoding="utf-8")
            declared = re.search(rf"\n{name}\((.*?)\) {{", source, re.DOTALL)[1].split(",")
            assert len(declared) == len(parameters)
            for kind, text in zip(parameters, declared, strict=True):
                assert re.search(KINDS[kind], text), (kind, text)
            self.names = [text.split()[-1].strip("*") for text in declared]
            self.layout, self.defines = struct.Struct("@" + parameters), defines

        def launch(self, grid, block, *values):
            self.layout.pack(*values)
            seen.append((grid, block, dict(zip(self.names, values, strict=True)), self.defines))

    monkeypatch.setattr(nvrtc, "kernel", Recorder)
    return seen


@pytest.mark.parametrize("columns", [256, 3584, 3840, 5376, 7168, 16384])
def test_quantize_rotate(launches, columns):
    x = torch.zeros(5, columns + 256, dtype=torch.bfloat16)[:, :columns]
    q, scale = quantize_rotate_int8._plan_cuda(x)(x)
    ((grid, block, values, defines),) = launches
    assert values == {"x": x.data_ptr(), "q": q.data_ptr(), "scale": scale.data_ptr(), "x_stride": columns + 256}
    assert grid == 5 and block == 32 * defines["WARPS"] and defines["K"] == columns and defines["MULS"] == 1
    assert 14 * defines["WARPS"] * 256 >= columns and block * defines["MIN_BLOCKS"] <= 512


@pytest.mark.parametrize("columns", [256, 2048, 2304, 14336, 16384])
def test_swiglu(launches, columns):
    x = torch.zeros(5, 2 * columns, dtype=torch.bfloat16)
    q, scale = swiglu_int8._plan_cuda(x)(x)
    ((grid, block, values, defines),) = launches
    assert values == {"x": x.data_ptr(), "q": q.data_ptr(), "scale": scale.data_ptr(), "x_stride": 2 * columns}
    assert grid == 5 and block == 32 * defines["WARPS"] and defines["K"] == columns and defines["MULS"] == 1
    assert 8 * defines["WARPS"] * 256 >= columns and block * defines["MIN_BLOCKS"] <= 1024


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_forms(launches, monkeypatch, gated, table_dtype):
    x, other = torch.zeros(7, 512, dtype=torch.bfloat16), torch.zeros(7, 1024, dtype=torch.bfloat16)[:, :512]
    weight, rows = torch.ones(512, dtype=torch.bfloat16), row_map([(0, 7, 1)], 7, "cpu")
    shift, scale, gate = torch.zeros(3, 3 * 512).to(table_dtype).chunk(3, dim=1)
    casts, original = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a: casts.append(original(t, *a)) or casts[-1])
    args = (x, other, gate, weight, shift, scale, rows, 1e-5) if gated else (x, weight, shift, scale, rows, 1e-5)
    plan = norm_modulate_int8._plan_cuda_gated if gated else norm_modulate_int8._plan_cuda
    q, row_scales = plan(*args)(*args)
    ((grid, block, values, defines),) = launches
    read = [shift, scale, gate][: 3 if gated else 2] if table_dtype == torch.bfloat16 else casts
    assert len(casts) == (0 if table_dtype == torch.bfloat16 else 2 + gated)  # one rounding per table, none for what is not read
    assert grid == 7 and block == 64 and defines["K"] == 512 and defines["GATE"] == gated
    expected = {
        "x": x.data_ptr(), "x_stride": 512, "weight": weight.data_ptr(), "row_map": rows.data_ptr(), "q": q.data_ptr(),
        "row_scales": row_scales.data_ptr(), "eps": 1e-5, "shift": read[0].data_ptr(), "shift_stride": read[0].stride(0),
        "scale": read[1].data_ptr(), "scale_stride": read[1].stride(0),
    }
    if gated:
        expected |= {"other": other.data_ptr(), "other_stride": 1024, "gate": read[2].data_ptr(), "gate_stride": read[2].stride(0)}
    assert {name: values[name] for name in expected} == expected


def test_no_rows_means_no_launch(launches):
    x = torch.zeros(0, 512, dtype=torch.bfloat16)
    assert quantize_rotate_int8._plan_cuda(x)(x)[0].shape == (0, 512) and swiglu_int8._plan_cuda(x)(x)[1].shape == (0, 1)
    table, weight, rows = torch.zeros(1, 512), torch.ones(512, dtype=torch.bfloat16), row_map([], 0, "cpu")
    args = (x, weight, table, table, rows, 1e-5)
    assert norm_modulate_int8._plan_cuda(*args)(*args)[0].shape == (0, 512)
    assert not launches

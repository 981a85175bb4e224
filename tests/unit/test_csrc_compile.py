"""The CUDA sources of the bf16 and INT8 ops compile without warnings for every GPU generation; all sources have such a test."""

import re
from pathlib import Path

import pytest
from h3_vortex.kernels import norm_modulate, norm_modulate_int8, quantize_rotate_int8, swiglu, swiglu_int8
from h3_vortex.tests.unit import nvcc

UNIT = Path(__file__).resolve().parent
WIDTH = {"N": 5376, "THREADS": 224}
NORM = {"N": 5376, "AHEAD": norm_modulate.AHEAD, "MIN_BLOCKS": 10}


@pytest.mark.parametrize("name, defines", [
    ("modulate", {**WIDTH, "TABLE_F32": True}),
    ("gate", {**WIDTH, "TABLE_F32": False}),
    ("swiglu", {"F": 14336, "THREADS": 224, "VECTORS": swiglu.VECTORS_PER_THREAD}),
    ("norm_modulate", {**NORM, "GATE": False, "TABLE_F32": False}),
    ("norm_modulate", {**NORM, "GATE": True, "TABLE_F32": False, "FORCE_FMA": True}),
    ("qk_norm_rope", {"HEADS": 3}),
    ("quantize_rotate_int8", quantize_rotate_int8.defines(7168)),
    ("swiglu_int8", swiglu_int8.defines(14336)),
    ("norm_modulate_int8", norm_modulate_int8.defines(5376, True)),
], ids=str)  # fmt: skip
def test_compiles(name, defines, tmp_path):
    nvcc.check(name, tmp_path, **defines)


def test_every_source_is_compiled_by_some_test():
    compiled = set()
    for path in UNIT.glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "nvcc.check(" in text:
            compiled |= set(re.findall(r'"([a-z0-9_]+)"', text))
    missing = {path.stem for path in nvcc.CSRC.glob("*.cu")} - compiled
    assert not missing, f"no unit test compiles {', '.join(sorted(missing))}: call nvcc.check for it"

"""The op benchmark and the check on a CPU: what their rows hold, and that a wrong byte is noticed."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
from h3_vortex.benchmarks import check, gemm, harness, int8_cases, op_cases
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import Op

CPU = torch.device("cpu")
SMALL = {"width": 64, "heads": 1, "ffn": 64}


@pytest.fixture
def small(monkeypatch):
    original = op_cases.make

    def make(op, tokens, device, **options):
        size = {"width": 256, "ffn": 256} if op in int8_cases.OPS else SMALL
        return original(op, tokens, device, **{**options, **size})

    for module in (op_cases, check):
        monkeypatch.setattr(module, "make", make)


@pytest.mark.parametrize("op", stock.OPS + stock.NVFP4_OPS)
def test_row(small, op):
    row = op_cases.measure(op, 9, CPU, 1)
    op_cases.describe(row, 1.0, CPU)
    assert row["op"] == op and row["rows"] == 9 and row["traffic_bytes"] > 0
    assert row["backends"]["eager"]["differing"] == 0 and row["stock_ms"]["n"] == 2
    assert row["backends"]["eager"]["speedup"] > 0 and row["host_us"]["stock"] > 0
    assert row["unavailable"]["cuda"].startswith("needs ")


def test_result_file(small, tmp_path):
    out = tmp_path / "gate.json"
    assert op_cases.bench("gate", ("gate",), ["--device", "cpu", "--rows", "5,6", "--reps", "1", "--out", str(out)], "") == 0
    result = json.loads(out.read_text())
    assert result["kind"] == "gate" and result["speed_valid"] is False and result["ceilings"]["copy_rows_TBs"] > 0
    assert [(r["rows"], r["table_dtype"]) for r in result["rows"]] == [(5, "float32"), (6, "float32"), (5, "bfloat16"), (6, "bfloat16")]


def op_benchmarks():
    """The names of the front end that measure ops."""
    usage = subprocess.run([sys.executable, str(harness.ROOT / "benchmarks")], capture_output=True, text=True).stderr
    names = re.search(r"{(.*)}", usage)[1].split(",")
    return ["kernels", *(name for name in names if name in (*stock.OPS, *stock.NVFP4_OPS, *int8_cases.OPS))]


@pytest.mark.parametrize("name", op_benchmarks())
def test_every_op_benchmark_runs_on_a_cpu(small, tmp_path, name):
    out = tmp_path / "result.json"
    module = importlib.import_module(f"h3_vortex.benchmarks.{name}")
    # Where no row could be measured, the benchmark fails: stock's INT8 chains need a GPU.
    assert module.main(["--device", "cpu", "--rows", "5", "--reps", "1", "--out", str(out)]) == int(name in int8_cases.OPS)
    result = json.loads(out.read_text())
    harness.validate(result)
    assert result["kind"] == name and result["speed_valid"] is False
    measured = {row["op"]: row for row in result["rows"]}
    assert measured and (name == "kernels") == (set(measured) == set(check.OPS))
    for op, row in measured.items():
        if op in int8_cases.OPS:
            assert row["skipped"].startswith("stock cannot run here: needs a cuda tensor")
        else:
            assert all(entry["differing"] == 0 for entry in row["backends"].values())


def test_gemm_says_why_it_cannot_run_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="gemm times cuBLASLt schedules: it needs an NVIDIA GPU"):
        gemm.main(["--out", str(tmp_path / "g.json")])
    assert not (tmp_path / "g.json").exists()


def test_the_op_benchmark_measures_a_few_rows_on_a_cpu_and_prints_no_speed(small, tmp_path, capsys):
    assert op_cases.bench("gate", ("gate",), ["--device", "cpu", "--reps", "1", "--out", str(tmp_path / "gate.json")], "") == 0
    assert [row["rows"] for row in json.loads((tmp_path / "gate.json").read_text())["rows"]] == [64, 64]
    out = capsys.readouterr().out
    assert out.count("no speeds") == 1 and "of copy" not in out


def test_every_op_has_a_case():
    assert set(check.OPS) == {*stock.OPS, *stock.NVFP4_OPS, *int8_cases.OPS}
    with pytest.raises(ValueError, match="there is no case for op 'fly'"):
        stock.make("fly", 1, CPU)


def test_check_lists_every_backend(small):
    rows = check.run_check("cpu", ("gate", "norm_modulate"))
    assert [(r["op"], r["backend"]) for r in rows] == [
        ("gate", "eager"), ("gate", "cuda"), ("gate", "triton"), ("norm_modulate", "eager"), ("norm_modulate", "cuda")]
    eager, cuda, *_ = rows
    assert eager["differing"] == 0 and eager["reason"] is None and eager["ratio"] > 0
    assert cuda["reason"].startswith("needs ") and "not here: needs" in check.line(cuda, True)
    assert "stock's bytes" in check.line(eager, True) and check.line(eager, True).endswith("x")
    assert not check.line(eager, False).endswith("x"), "no ratio from a CPU"


def test_a_wrong_byte_fails_the_check_and_the_benchmark(small, monkeypatch, tmp_path, capsys):
    reference = Op.registry["gate"].reference

    def off_by_a_bit(x, other, gate, rows):
        reference(x, other, gate, rows).view(torch.int16)[0, 0] ^= 1
        return x

    monkeypatch.setattr(Op.registry["gate"].backends["eager"], "run", off_by_a_bit)
    assert check.main(["--device", "cpu", "--ops", "gate"]) == 1
    assert "1 ELEMENTS DIFFER" in capsys.readouterr().out
    out = tmp_path / "gate.json"
    assert op_cases.bench("gate", ("gate",), ["--device", "cpu", "--rows", "5", "--reps", "1", "--out", str(out)], "") == 1
    assert json.loads(out.read_text())["rows"][0]["backends"]["eager"]["differing"] == 1


def test_the_check_keeps_its_evidence(small, tmp_path, capsys):
    assert check.main(["--device", "cpu", "--ops", "gate", "--out", str(tmp_path / "mine.json")]) == 0
    assert capsys.readouterr().out.count("harness check on a CPU: no speeds") == 1
    kept = json.loads((tmp_path / "mine.json").read_text())
    assert kept["kind"] == "check" and kept["speed_valid"] is False
    assert {row["backend"] for row in kept["rows"]} == {"cuda", "triton", "eager"}

"""The measuring harness itself: sizes, clocks, hashes, results and gates, without ComfyUI and without a GPU."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.benchmarks import candidates, compare, full_size, harness, machine, shapes, step, trajectory

jsonschema = pytest.importorskip("jsonschema", reason="results are checked with jsonschema (requirements/test-tools.txt)")

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize(
    ("name", "latent", "audio", "rows"),
    [
        ("canonical", (37, 48, 84), 207, 37_810),
        ("864x480x124", (37, 30, 54), 207, 15_499),
        ("1344x768x362", (107, 48, 84), 603, 109_162),
    ],
)
def test_jobs_have_the_rows_that_were_measured(name, latent, audio, rows):
    job = shapes.job(name)
    assert (job.latent, job.audio, job.rows) == (latent, audio, rows)


def test_a_job_by_its_size_is_the_named_one():
    assert shapes.job("1344x768x124").rows == shapes.JOBS["canonical"].rows


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("1344x770x124", "height 770 is not a multiple of 32: use 768 or 800"),
        ("1350x768x124", "width 1350 is not a multiple of 32: use 1344 or 1376"),
        ("864x480x100", "100 frames is not on the 17k.5 grid: use 90 or 107"),
        ("640x480", "unknown job '640x480'"),
        ("0x64x5", "width 0"),
    ],
)
def test_a_wrong_job_says_what_is_wrong(name, says):
    with pytest.raises(ValueError, match=says):
        shapes.job(name)


def test_model_arithmetic_matches_the_measured_model():
    model, job = shapes.MODELS["h3"], shapes.JOBS["canonical"]
    assert model.gemms() == {"qkv": (21504, 5376), "out_proj": (5376, 7168), "fc1": (28672, 5376), "fc2": (5376, 14336)}
    matrix, attention = shapes.step_flops(model, job)
    assert matrix == 50 * 2 * 37_810 * sum(out * into for out, into in model.gemms().values())
    assert attention == 50 * 4 * 37_810**2 * 7168
    # An H200 took 8.51 s (FlashAttention-2) and 6.35 s (cuDNN) for this step; the plan must be of that size.
    for attention_name, seconds in (("fa2", 8.51), ("cudnn", 6.35), ("kitchen", 7.14)):
        assert step.estimate_step_s(model, job, attention_name, 773.0, 3.84) == pytest.approx(seconds, rel=0.05)


# ---------------------------------------------------------------------------------------------------------- measuring
def test_measure_returns_the_value_and_a_time():
    value, sample = harness.measure(lambda: 41 + 1, CPU)
    assert value == 42 and sample.ms >= 0 and sample.host_ms == sample.ms and sample.peak_bytes == 0


def test_alternate_takes_turns_and_reverses_every_second_round():
    order, seen = [], []

    def case(name):
        @contextlib.contextmanager
        def enter():
            order.append(f"+{name}")
            yield lambda: order.append(name) or name
            order.append(f"-{name}")

        return enter

    samples = harness.alternate({"a": case("a"), "b": case("b")}, 3, CPU, lambda *what: seen.append(what))
    assert [word for word in order if word[0] not in "+-"] == ["a", "b", "b", "a", "a", "b"]
    assert order[:3] == ["+a", "a", "-a"]
    assert seen == [("a", 0, "a"), ("b", 0, "b"), ("b", 1, "b"), ("a", 1, "a"), ("a", 2, "a"), ("b", 2, "b")]
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


def test_summary():
    result = harness.summary([3.0, 1.0, 2.0])
    assert result == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3, "values": [3.0, 1.0, 2.0]}
    with pytest.raises(ValueError, match="never run"):
        harness.summary([])


def test_sha256_sees_every_bit_dtype_and_shape():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    flipped = base.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    variants = [base, flipped, base.reshape(4, 3), base.to(torch.bfloat16), -base, base * 0, base * -0.0]
    hashes = [harness.sha256([tensor]) for tensor in variants]
    assert len(set(hashes)) == len(hashes)
    assert harness.sha256([base.t().contiguous().t()]) == hashes[0], "strides are no part of the value"
    assert harness.sha256([base, flipped]) != harness.sha256([flipped, base])


def test_differing_counts_bytes_not_values():
    a = torch.tensor([0.0, 1.0, float("nan")])
    assert harness.differing(a, a.clone()) == 0, "the same NaN is no difference"
    assert harness.differing(a, torch.tensor([-0.0, 1.0, float("nan")])) == 1
    with pytest.raises(ValueError, match="cannot compare"):
        harness.differing(a, a.to(torch.bfloat16))


# -------------------------------------------------------------------------------------------------------------- results
def result_with(kind, rows):
    result = harness.start_result(kind, CPU, ["--reps", "1"], "0.33.0")
    result["rows"] = rows
    return result


def step_row(**changes):
    times = harness.summary([2.0, 1.0])
    row = {
        "model": "tiny", "blocks": 3, "weights": "bf16", "shape": "tiny", "rows": 31, "attention": "fa2",
        "candidate": "stock", "first_call_ms": 3.0, "ms": times, "host_ms": times, "resident_bytes": 0, "peak_bytes": 0,
        "sha256": "0" * 64, "repeatable": True, "equal_to_stock": True, "finite": True, "errors": [], "report": None,
        "speedup": {"of_medians": 1.0, "per_round": times}, "dispatch": None,
    }  # fmt: skip
    return row | changes


def test_results_follow_the_schema(tmp_path):
    jsonschema.Draft202012Validator.check_schema(json.loads(harness.SCHEMA.read_text()))
    result = result_with("step", [step_row(), {**step_row(), "candidate": None, "skipped": "needs a CUDA device"}])
    harness.validate(result)
    harness.write_result(result, tmp_path / "deep" / "a.json")
    assert json.loads((tmp_path / "deep" / "a.json").read_text()) == result
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: result["rows"][0].pop("sha256"),
        lambda result: result["rows"][0].update(attention="magic"),
        lambda result: result["rows"][0]["ms"].update(n=0),
        lambda result: result["environment"].pop("source_sha256"),
        lambda result: result.update(clock="sundial"),
        lambda result: result.update(speed_valid=True),
    ],
)
def test_the_schema_refuses(spoil):
    result = result_with("step", [step_row()])
    harness.validate(result)
    spoil(result)
    with pytest.raises(jsonschema.ValidationError):
        harness.validate(result)


def test_committed_results_follow_the_schema():
    for path in sorted(harness.RESULTS.glob("*.json")):
        harness.validate(json.loads(path.read_text(encoding="utf-8")))


def test_measurements_survive_a_failure_and_odd_numbers(tmp_path):
    result = result_with("kernels", [{"op": "gate", "rel": float("nan")}])
    with pytest.raises(KeyError), harness.guarded(result, tmp_path / "r.json"):
        raise KeyError("late")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["rows"] == [{"op": "gate", "rel": "nan"}] and "late" in written["error"]


def test_the_schema_knows_every_weight_storage_and_attention():
    properties = json.loads(harness.SCHEMA.read_text(encoding="utf-8"))["$defs"]["configuration"]["properties"]
    assert properties["weights"]["enum"] == list(full_size.WEIGHTS)
    assert properties["attention"]["enum"] == list(full_size.ATTENTIONS)


def test_a_result_off_the_schema_is_kept_and_told(tmp_path, capsys):
    result = result_with("step", [step_row(weights="fp3")])
    with harness.guarded(result, tmp_path / "r.json"):
        pass
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["weights"] == "fp3"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "does not follow result.schema.json" in line]
    assert "rows.0.weights: 'fp3' is not one of ['bf16', 'int8', 'nvfp4']" in line
    with pytest.raises(jsonschema.ValidationError):
        harness.validate(result)


def test_a_failed_write_leaves_no_part_and_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    harness.write_result(result_with("step", []), tmp_path / "r.json")
    before = (tmp_path / "r.json").read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        harness.write_result(result_with("step", [step_row()]), tmp_path / "r.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"] and (tmp_path / "r.json").read_bytes() == before


def test_a_run_without_a_row_leaves_a_file_only_where_one_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")

    def fail(path, rows):
        with pytest.raises(KeyError), harness.guarded(result_with("kernels", rows), path):
            raise KeyError("late")
        return path.exists()

    assert not fail(harness.out_path(None, "kernels", CPU), [])
    assert fail(harness.out_path(None, "kernels", CPU), [{"op": "gate"}])
    assert fail(tmp_path / "asked.json", [])


def test_a_default_place_that_cannot_be_written_is_told_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "results").write_text("a file")
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    with pytest.raises(SystemExit, match="cannot be written .*, with --out"):
        harness.out_path(None, "step", CPU)


def test_a_cpu_run_says_once_that_it_measures_no_speed(tmp_path, capsys):
    with harness.guarded(result_with("step", []), tmp_path / "r.json"):
        pass
    assert capsys.readouterr().out.count("harness check on a CPU: no speeds") == 1
    assert "x stock" not in step.describe(step_row(), CPU) and "1.0000 x stock" in step.describe(step_row(), torch.device("cuda"))


def test_a_cpu_result_says_that_its_times_mean_nothing():
    result = result_with("step", [])
    assert result["clock"] == "wall" and result["speed_valid"] is False
    assert result["environment"]["device"] == "cpu" and len(result["environment"]["source_sha256"]) == 64


def test_ceilings_are_positive_numbers():
    rates = harness.ceilings(CPU, 32, 64)
    assert all(value > 0 for value in rates.values())
    assert rates["rows"] == 32 and rates["hidden"] == 64


def test_power_log_counts_busy_samples_only():
    lines = ["640.0, 700.00, 1755, 100, 55, Active", "120.0, 700.00, 1980, 3, 40, Not Active",
             "650.0, 700.00, 1805, 97, 57, Not Active", "[N/A], 700, 1, 100, 1, Active", "6"]  # fmt: skip
    power = machine.PowerLog.summarise(lines)
    assert power["busy_samples"] == 2 and power["power_capped_share"] == 0.5
    assert power["power_W"] == {"mean": 645.0, "max": 650.0, "limit": 700.0}
    assert power["sm_clock_MHz"]["min"] == 1755.0
    assert machine.PowerLog.summarise([]) == {"busy_samples": 0}


def test_power_log_needs_no_nvidia_smi():
    result = {"power": None}
    with machine.PowerLog(CPU, result):
        pass
    assert result["power"] is None


SMI = """#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons.sw_power_cap" is not a valid field to query.'; exit 2;;
*--loop-ms*) while true; do echo '640.0, 700.00, 1755, 100, 55, Active'; sleep 0.05; done;;
*) echo 'Not Active';;
esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script")
def test_power_log_samples_nvidia_smi_and_stops_it(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_uuid", lambda device: "GPU-0")
    result = {"power": None}
    power = machine.PowerLog(torch.device("cuda"), result)
    with power:
        time.sleep(0.5)
    assert result["power"]["busy_samples"] >= 2 and result["power"]["power_capped_share"] == 1.0
    assert power._fields[-1] == "clocks_throttle_reasons.sw_power_cap", "older drivers know the flag by its older name"
    assert power._process.returncode is not None


def test_sdpa_order_is_put_back_after_a_failure():
    from torch.nn.attention import SDPBackend

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    core = SimpleNamespace(ops=SimpleNamespace(SDPA_BACKEND_PRIORITY=order))
    with full_size.sdpa_order(core, "fa2"):
        assert len(order) == 2
    with pytest.raises(KeyError), full_size.sdpa_order(core, "cudnn"):
        assert order == [SDPBackend.CUDNN_ATTENTION]
        raise KeyError
    assert core.ops.SDPA_BACKEND_PRIORITY is order
    assert order == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def test_the_front_end_lists_the_benchmarks_and_keeps_them_off_the_path():
    done = subprocess.run([sys.executable, str(harness.ROOT / "benchmarks"), "kernel"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown benchmark kernel; near it: kernels" in done.stderr
    assert {"step", "block", "trajectory", "compare"} <= set(done.stderr.split("{")[1].split("}")[0].split(","))
    done = subprocess.run([sys.executable, str(harness.ROOT / "benchmarks"), "step", "--plan"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["plan"]


def test_compare_pairs_rows_and_names_unequal_bytes(tmp_path, capsys):
    slow = result_with("step", [step_row(ms=harness.summary([4.0])), step_row(weights="int8")])
    fast = result_with("step", [step_row(ms=harness.summary([2.0]), sha256="1" * 64)])
    assert compare.compare(slow, fast) == [("tiny 3 bf16 tiny 31 fa2 stock", 4.0, 2.0, 2.0, False)]
    for name, result in (("a", slow), ("b", fast)):
        harness.write_result(result, tmp_path / name)
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "say nothing about speed" in capsys.readouterr().out


RESULT_KINDS = {json.loads(path.read_text(encoding="utf-8"))["kind"]: path for path in sorted(harness.RESULTS.glob("*.json"))}


@pytest.mark.parametrize("kind", RESULT_KINDS)
def test_compare_reads_every_kind_of_committed_result(kind, capsys):
    result = json.loads(RESULT_KINDS[kind].read_text(encoding="utf-8"))
    doubled = json.loads(RESULT_KINDS[kind].read_text(encoding="utf-8"))
    table = compare.compare(result, doubled)
    rows = [row for row in result["rows"] if compare.measured(row)]
    assert table and len(rows) >= 1 and len({text for text, *_ in table}) == len(table), "two measurements share a name"
    assert len(table) == sum(len(compare.measured(row)) for row in rows)
    assert all(ratio in (None, 1.0) and same in (None, True) for _, _, _, ratio, same in table)
    assert compare.main([str(RESULT_KINDS[kind])] * 2) == 0
    assert "ratio 1.0000" in capsys.readouterr().out


def test_compare_knows_blocks_gates_ops_and_schedules():
    summary = harness.summary

    def table(one, other):
        return {text: (ratio, same) for text, _, _, ratio, same in compare.compare({"rows": [one]}, {"rows": [other]})}

    block_row = {"weights": "int8", "candidate": "exact", "groups_ms": {"rope": 2.0}, "sum_ms": 8.0}
    assert table(block_row, {**block_row, "groups_ms": {"rope": 1.0}, "sum_ms": 4.0}) == {
        "int8 exact rope": (2.0, None), "int8 exact sum": (2.0, None)}  # fmt: skip
    sides = {"seconds": 3.0, "video_sha256": "v", "audio_sha256": "a"}
    gate_row = {"gate": "full", "steps": 12, "stock": sides, "ours": sides}
    other = {**gate_row, "ours": {**sides, "seconds": 2.0, "audio_sha256": "b"}}
    assert table(gate_row, other) == {"full 12 stock": (1.0, True), "full 12 ours": (1.5, False)}
    hashed = {"gate": "bytes", "steps": 1, "stock": {"sha256": "x"}, "ours": {"sha256": "x"}}
    assert table(hashed, hashed) == {"bytes 1 stock": (None, True), "bytes 1 ours": (None, True)}
    op_row = {"op": "gate", "rows": 5, "stock_ms": summary([4.0]), "backends": {"cuda": {"ms": summary([2.0])}}}
    faster = {**op_row, "backends": {"cuda": {"ms": summary([1.0])}}}
    assert table(op_row, faster) == {"5 gate stock": (1.0, None), "5 gate cuda": (2.0, None)}
    assert table({"op": "gate", "rows": 5, "skipped": "no"}, op_row) == {}
    schedule = {"layer": "fc2", "problem": "bf16 1x2x3", "stock_ms": 4.0, "best_ms": 2.0}
    assert table(schedule, {**schedule, "stock_ms": None}) == {"fc2 bf16 1x2x3 best exact schedule": (1.0, None)}


def test_a_row_of_ones_own_gets_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 5090")
    path = harness.out_path(None, "step", torch.device("cuda"))
    assert path.parent == harness.RESULTS and re.fullmatch(r"step-nvidia-geforce-rtx-5090-\d{8}T\d{6}Z\.json", path.name)
    assert re.fullmatch(r"gate-cpu-\d{8}T\d{6}Z\.json", harness.out_path(None, "gate", CPU).name)
    assert harness.out_path("here.json", "gate", CPU).name == "here.json"


# ------------------------------------------------------------------------------------------------------- step and gates
def test_configurations_build_each_model_once_and_large_jobs_first():
    chosen = step.arguments(["--weights", "int8,bf16", "--attention", "fa2,cudnn", "--shape", "small,canonical"])
    order = [(weights, job.name, attention) for weights, job, attention in step.configurations(chosen)]
    assert order[:4] == [("bf16", "canonical", "fa2"), ("bf16", "canonical", "cudnn"), ("bf16", "small", "fa2"),
                         ("bf16", "small", "cudnn")]  # fmt: skip
    assert [entry[0] for entry in order] == ["bf16"] * 4 + ["int8"] * 4


def test_only_names_the_pairs():
    chosen = step.arguments(["--only", "int8:kitchen,bf16:fa2"])
    assert [(w, a) for w, _, a in step.configurations(chosen)] == [("bf16", "fa2"), ("int8", "kitchen")]


def test_the_plan_adds_up(capsys):
    chosen = ["--plan", "--attention", "fa2,cudnn", "--reps", "2"]
    assert step.main(chosen) == 0
    plan = json.loads(capsys.readouterr().out)
    entries = plan["plan"]
    assert [entry["calls"] for entry in entries] == [6, 6]  # (1 warm-up + 2 rounds) x (stock, exact)
    assert plan["assuming"] == "H200"
    assert plan["estimated_s"] == pytest.approx(sum(entry["estimated_s"] for entry in entries) + 10, abs=0.11)


def test_the_plan_estimates_the_full_model_alone(capsys):
    assert step.main(["--plan", "--model", "tiny", "--shape", "tiny"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "plan": [{"weights": "bf16", "shape": "tiny", "rows": 31, "attention": "fa2", "calls": 8}]}  # fmt: skip


def test_dispatch_counts_what_stock_did():
    account = {"ops": {"gate": {"fused": {"cuda": 3}, "stock": {"small": 1}}}, "stepped_aside": None}
    assert candidates.dispatch(account) == {"fused": 3, "stock": 1, "why_stock": {"gate: small": 1}}
    assert not candidates.stood_by({"dispatch": candidates.dispatch(account)})
    aside = candidates.dispatch({"ops": {}, "stepped_aside": "unknown core"})
    assert candidates.stood_by({"dispatch": aside}) and aside["why_stock"] == {"everything": "unknown core"}
    assert candidates.dispatch(None) is None and not candidates.stood_by({"dispatch": None})


def test_only_a_gpu_makes_a_row_in_which_nothing_was_fused_a_fault():
    aside = {"fused": 0, "stock": 6, "why_stock": {}}
    rows = [{"candidate": "stock", "dispatch": None}, {"candidate": "exact", "dispatch": aside},
            {"candidate": "fastest", "dispatch": aside}, {"candidate": "exact", "dispatch": {**aside, "fused": 6}},
            {"candidate": None, "skipped": "needs a CUDA device"}]  # fmt: skip
    assert candidates.idle(rows, torch.device("cuda")) == [rows[1]]
    assert candidates.idle(rows, CPU) == []


def test_watched_blocks():
    assert trajectory.watched_blocks(50) == (0, 24, 49)
    assert trajectory.watched_blocks(3) == (0, 1, 2)


def test_gates_keep_their_order():
    assert trajectory.arguments(["--gates", "full,bytes"]).gates == ["bytes", "full"]


def test_a_result_does_not_tell_folders():
    argv = ["--comfyui=/somewhere/else/ComfyUI", "--shape", "tiny", "--out", "/somewhere/private/mine.json"]
    assert harness.without_folders(argv) == ["--comfyui=ComfyUI", "--shape", "tiny", "--out", "mine.json"]
    assert harness.start_result("step", "cpu", argv)["command"] == [
        "python", "run.py", "bench", "step", "--comfyui=ComfyUI", "--shape", "tiny", "--out", "mine.json"]  # fmt: skip

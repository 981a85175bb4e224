"""Wrong arguments of the benchmarks: one line that says what to use instead, exit code 2, and nothing built, measured or written."""

import json
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.benchmarks import (
    _comfy,
    attention,
    block,
    compare,
    diffusers_step,
    gemm,
    harness,
    kernels,
    model_arguments,
    op_cases,
    plot,
    shapes,
    step,
    trajectory,
    turbo,
)
from h3_vortex.frontdoor import cmd_bench
from h3_vortex.frontdoor.environment import SetupError

TOOLS = {"attention": attention, "block": block, "compare": compare, "diffusers_step": diffusers_step, "gemm": gemm, "kernels": kernels,
         "plot": plot, "step": step, "trajectory": trajectory, "turbo": turbo}  # fmt: skip


@pytest.fixture(autouse=True)
def no_work(monkeypatch, tmp_path):
    """Importing ComfyUI or measuring a ceiling fails the test; results would land in an empty folder."""

    def never(*_):
        pytest.fail("the arguments were taken")

    monkeypatch.setattr(_comfy, "load", never)
    for module in (harness, attention, gemm, op_cases):
        monkeypatch.setattr(module, "ceilings", never)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    yield
    assert not list(tmp_path.glob("*-cpu-*.json"))


def refusal(capsys, tool, *argv):
    """The line with which ``tool`` refuses ``argv``."""
    with pytest.raises(SystemExit) as caught:
        TOOLS[tool].main(list(argv))
    line = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and line.startswith(f"run.py bench {tool}: error: "), line
    return line


@pytest.mark.parametrize(("command", "says"), [
    ("step --shape 1350x768x124", "width 1350 is not a multiple of 32: use 1344 or 1376"),
    ("block --shape 864x480x100", "100 frames is not on the 17k+5 grid: use 90 or 107"),
    ("step --shape tiny,canonicle", "unknown job 'canonicle': use canonical, "),
    ("trajectory --shape 864x480", "WIDTHxHEIGHTxFRAMES"),
    ("trajectory --small-shape 864x480", "WIDTHxHEIGHTxFRAMES"),
    ("turbo --shape 32x31x5", "height 31 is out of range: use 32 to 16384"),
    ("diffusers_step --shape 864x480x100", "use 90 or 107"),
    ("attention --job 864x480x100", "use 90 or 107"),
    ("step --model h4", "unknown model 'h4': use h3, tiny"),
    ("attention --model h4", "unknown model 'h4': use h3, tiny"),
    ("gemm --model h4", "unknown model 'h4': use h3, tiny"),
    ("attention --backends sdpa_flash,stok", "unknown backend 'stok': use sdpa_flash, "),
    ("attention --rounds 0", "'0' is not a whole number of 1 or more"),
    ("block --weights bf61", "unknown weights 'bf61': use bf16, int8, nvfp4"),
    ("step --weights int8,bf61", "unknown weights 'bf61'"),
    ("turbo --weights bf61", "unknown weights 'bf61'"),
    ("turbo --weights ,", "',' names nothing"),
    ("block --attention fa3", "unknown attention 'fa3': use fa2, cudnn, kitchen, sage"),
    ("step --attention fa3", "unknown attention 'fa3'"),
    ("turbo --attention fa2,cudnn", "invalid choice: 'fa2,cudnn'"),
    ("turbo --attention cudn", "invalid choice: 'cudn'"),
    ("block --candidates exakt", "unknown candidate 'exakt': use stock, exact, "),
    ("step --candidates stock,magic", "unknown candidate 'magic'"),
    ("step --only bf16:magic", "unknown attention 'magic'"),
    ("step --only bf16", "'bf16' is not WEIGHTS:ATTENTION"),
    ("step --only bf16:fa2 --weights bf16", "leave out --weights and --attention"),
    ("step --only bf16:fa2 --attention fa2", "leave out --weights and --attention"),
    ("step --reps 0", "'0' is not a whole number of 1 or more"),
    ("step --warmup -1", "'-1' is not a whole number of 1 or more"),
    ("trajectory --steps 0", "'0' is not a whole number of 1 or more"),
    ("turbo --reps 0", "'0' is not a whole number of 1 or more"),
    ("diffusers_step --reps 0", "'0' is not a whole number of 1 or more"),
    ("kernels --reps 0", "'0' is not a whole number of 1 or more"),
    ("kernels --rows 64,abc", "'abc' is not a whole number of 1 or more"),
    ("kernels --rows 0", "'0' is not a whole number of 1 or more"),
    ("kernels --ops gat", "unknown op 'gat': use "),
    ("kernels --rep 3", "unrecognized arguments: --rep 3"),
    ("step --blocks 0", "0: model h3 has 50 blocks, use 1 to 50"),
    ("turbo --blocks -3", "-3: model h3 has 50 blocks, use 1 to 50"),
    ("trajectory --blocks 99", "99: model h3 has 50 blocks, use 1 to 50"),
    ("block --blocks 1", "1: model h3 has 50 blocks, use 2 to 50"),
    ("block --model tiny --blocks 4", "4: model tiny has 3 blocks, use 2 to 3"),
    ("trajectory --gates bytes,shrt", "unknown gate 'shrt': use bytes, linear, blocks, short, full"),
    ("step --option foo=1", "'foo=1' is not KEY=VALUE with one of the keys features, attention, mode"),
    ("step --option foo", "one of the keys features, attention, mode"),
    ("step --option attention", "'attention' is not KEY=VALUE"),
    ("step --option attention=magic", "attention backend 'magic' is unknown"),
    ("step --option features=rope", "features take switches as JSON"),
    ('step --option features={"rop":true}', "rop: each is one of norm, gate, rope, "),
    ('step --option features={"rope":"no"}', "rope: each is one of norm, gate, rope, "),
    ("diffusers_step --features rop=0", "rop: each is one of norm, gate, rope, "),
    ("diffusers_step --features rope", "rope: each is one of norm, gate, rope, "),
    ("gemm --kinds fp6", "unknown kind 'fp6': use bf16, fp8, nvfp4"),
    ("gemm --layers fc3", "unknown layer 'fc3': use fc2, qkv, out_proj, fc1"),
    ("step --device magic", "unknown device 'magic': use cuda or cpu"),
    ("kernels --device meta", "device 'meta' cannot be measured: use cuda or cpu"),
])  # fmt: skip
def test_a_wrong_argument_is_one_line(capsys, command, says):
    assert says in refusal(capsys, *command.split())


def test_cuda_asked_for_in_vain(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "cuda: this torch sees no CUDA device (use cpu for a harness check)" in refusal(capsys, "step", "--device", "cuda")


def test_a_cuda_device_has_a_number_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    picked = [harness.pick_device(name) for name in (None, "cuda", "cuda:0", torch.device("cuda", 1), "cpu")]
    assert list(map(str, picked)) == ["cuda:1", "cuda:1", "cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match="cuda:2: the last CUDA device here is cuda:1"):
        harness.pick_device("cuda:2")


@pytest.mark.parametrize("tool", ["step", "kernels", "attention", "gemm"])
def test_a_place_that_cannot_be_written_is_told_before_the_run(capsys, tmp_path, tool):
    assert "is a folder: name a file" in refusal(capsys, tool, "--out", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(capsys, tool, "--out", str(tmp_path / "file" / "result.json"))
    assert model_arguments.harness.writable(tmp_path / "new" / "result.json").parent.is_dir()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "new"]


def test_what_is_no_result_file_is_told(capsys, tmp_path):
    good = tmp_path / "good.json"
    harness.write_result(harness.start_result("step", "cpu", []), good)
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "other.json").write_text(json.dumps({"rows": []}))
    for name, says in (("missing.json", "cannot be read"), ("text.json", "is not JSON"), ("other.json", "holds no result"), ("", "cannot")):
        assert says in refusal(capsys, "compare", str(good), str(tmp_path / name))
        assert says in refusal(capsys, "plot", "--block", str(tmp_path / name))


@pytest.mark.parametrize("tool", ["step", "block", "trajectory", "turbo", "attention", "diffusers_step"])
def test_the_full_model_is_refused_on_a_cpu(tool):
    with pytest.raises(SystemExit, match="the full-size model needs a GPU; to try the command on a CPU: --model tiny --shape tiny"):
        TOOLS[tool].main(["--device", "cpu"])


def test_a_copy_of_the_pack_without_benchmarks_says_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(cmd_bench, "BENCHMARKS", tmp_path / "benchmarks")
    with pytest.raises(SetupError, match="there is no .*benchmarks: .* use a clone of its repository"):
        cmd_bench.run(SimpleNamespace(benchmark="step", rest=[], comfyui=None, python=None))


def test_option_values_are_json_or_words():
    assert model_arguments.option('features={"rope": false}') == ("features", {"rope": False})
    assert model_arguments.option("attention=fastest dense") == ("attention", "fastest dense")
    assert model_arguments.option("mode=exact") == ("mode", "exact")
    assert diffusers_step.features("rope=0,gate=1") == {"rope": False, "gate": True}


def test_lists_are_taken_once_in_their_order():
    chosen = step.arguments(["--weights", "int8,bf16,int8", "--shape", "tiny,tiny"])
    assert chosen.weights == ["int8", "bf16"] and chosen.shape == [shapes.JOBS["tiny"]]


def test_the_model_is_cut_to_its_blocks():
    assert step.arguments([]).model.blocks == 50 and step.arguments(["--blocks", "7"]).model.blocks == 7
    assert block.arguments([]).model.blocks == 4 and block.arguments(["--model", "tiny"]).model.blocks == 3


def test_turbo_tells_its_limit(capsys):
    with pytest.raises(SystemExit):
        turbo.main(["--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: run.py bench turbo ") and "more than 6%" in " ".join(out.split())

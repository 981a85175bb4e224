"""``run.py generate`` and the demo without a ComfyUI at the front door, and one clip on two ranks."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from h3_vortex.frontdoor import cli, cmd_demo, cmd_generate, embedded_demo, environment, interpreter, locate

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).resolve().parent / "parallel_worker.py"


@pytest.fixture
def no_comfyui(monkeypatch):
    def nothing(*_, **__):
        raise locate.NotFound("No ComfyUI 0.33.0 or newer was found, and none could be fetched: no network.\nLooked at many places")

    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    monkeypatch.setattr(locate, "require_comfyui", nothing)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(cmd_generate, "python_for_diffusers", lambda named=None, say=print: Path(sys.executable))


def test_demo_without_a_comfyui_says_so_and_runs_diffusers(no_comfyui, here, monkeypatch, capsys, tmp_path):
    runs = []
    monkeypatch.setattr(embedded_demo, "run", lambda out, cpu: runs.append((out, cpu)) or 0)
    assert cli.main(["demo", "--cpu", "--out", str(tmp_path)]) == 0
    assert runs == [(tmp_path, True)]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith("No ComfyUI") and said[0].endswith("diffusers instead.")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_demo_does_not_replace_a_comfyui_that_was_named(no_comfyui, monkeypatch, capsys, how):
    monkeypatch.setattr(embedded_demo, "run", lambda *_: pytest.fail("ran"))
    if how == "environment":
        monkeypatch.setenv("COMFYUI_DIR", "/nowhere")
    assert cli.main(["demo", *(["--comfyui", "/nowhere"] if how == "argument" else [])]) == 1
    assert "No ComfyUI" in capsys.readouterr().err


def test_demo_goes_on_under_the_python_that_has_diffusers(no_comfyui, monkeypatch, tmp_path):
    monkeypatch.setattr(cmd_generate, "python_for_diffusers", lambda named=None, say=print: Path("/other/python"))
    handed = []
    monkeypatch.setattr(interpreter, "go_on", lambda *line: handed.append(line) or 0)
    assert cmd_demo.run(argparse.Namespace(comfyui=None, python=None, embedded=False, cpu=True, out=str(tmp_path))) == 0
    assert handed == [(Path("/other/python"), "demo", ["--embedded", "--out", tmp_path, "--cpu"])]


def test_python_for_diffusers(monkeypatch):
    made = []
    monkeypatch.setattr(environment, "ensure_venv", lambda say=print: made.append(1) or Path("/pack/.venv/bin/python"))
    monkeypatch.setattr(locate, "missing_modules", lambda python, modules: [])
    assert cmd_generate.python_for_diffusers() == Path(sys.executable) and cmd_generate.python_for_diffusers("p") == Path("p")
    monkeypatch.setattr(locate, "missing_modules", lambda python, modules: ["diffusers"])
    assert cmd_generate.python_for_diffusers() == Path("/pack/.venv/bin/python") and made == [1]
    with pytest.raises(environment.SetupError, match="it has no diffusers"):
        cmd_generate.python_for_diffusers("p")


def test_our_environment_has_what_generate_needs():
    lines = (environment.REQUIREMENTS / "diffusers.txt").read_text() + (environment.REQUIREMENTS / "comfyui.txt").read_text()
    packages = {"PIL": "Pillow"}
    for module in cmd_generate.RUNS_GENERATE:
        if module not in ("torch", "torchvision"):  # torch.txt, torch-companions.txt
            assert f"\n{packages.get(module, module)}==" in lines, module


@pytest.mark.parametrize("line, message", [
    (["--out", "clip.avi"], "must end in .mp4"),
    (["--out", "clip.mp4", "--parallel", "0"], "at least 1"),
])
def test_wrong_arguments(here, capsys, line, message):
    assert cli.main(["generate", "--prompt", "a fox", *line]) == 1
    assert message in capsys.readouterr().err


def test_sizes_follow_the_model():
    parser = argparse.ArgumentParser()
    cmd_generate.add_arguments(parser)
    tiny, real, fast = (cmd_generate.request_of(parser.parse_args(["--prompt", "a fox", "--out", "x.mp4", *more])) for more in (
        [], ["--model", "H3"], ["--model", "H3", "--turbo", "t.safetensors"]))
    assert (tiny.width, tiny.height, tiny.steps) == (64, 64, 4)
    assert (real.width, real.height, real.steps) == (1344, 768, None) and fast.steps is None


def test_parallel_starts_torchrun(here, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(subprocess, "call", lambda line: started.append(line) or 0)
    monkeypatch.setattr(sys, "argv", ["run.py", "generate", "--prompt", "a fox", "--parallel", "3", "--out", "x.mp4"])
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(sys.argv[1:]) == 0
    assert started == [[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3",
                        str(ROOT / "run.py"), "generate", *sys.argv[2:]]]


def test_two_ranks(tmp_path):
    """diffusers' context parallelism over gloo: fused ops on each rank's shard, the bytes of stock on the same ranks, and a clip."""
    pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")
    if sys.platform == "win32":
        pytest.skip("torchrun over gloo is tested on Linux only")
    import torch
    from h3_vortex.h3 import embedded_tiny
    from h3_vortex.tests.unit import h3_jobs

    environ = {**os.environ, "H3_VORTEX_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    model = embedded_tiny.transformer()
    arguments = h3_jobs.arguments("first frame", model)
    for rank in ranks:
        assert {rank[key] for key in ("patched", "again", "undone")} == {rank["stock"]} == {ranks[0]["stock"]}
        assert rank["rows"] == len(arguments["position_ids"]) // 2
        assert all(calls["fused"] and not calls["stock"] for calls in rank["ops"].values()) and len(rank["ops"]) == 5
        assert rank["generate"] == 0
    # Against one rank: a matrix product of half the rows may sum in another order. Every block rounds to bf16 about ten times.
    with torch.no_grad():
        one = model(**arguments)
    for ours, alone in zip(torch.load(tmp_path / "rank0.pt"), one, strict=True):
        error = (ours - alone).abs().max() / alone.abs().max()
        assert error <= 10 * len(model.transformer_blocks) * torch.finfo(torch.bfloat16).eps / 2, float(error)
    assert json.loads((tmp_path / "two.json").read_text())["ranks"] == 2 and (tmp_path / "two.mp4").stat().st_size > 1000

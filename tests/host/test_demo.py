"""``run.py demo`` and ``run.py queue`` as a user calls them, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from h3_vortex.frontdoor.cmd_demo import EXPECTED, describe_video

ROOT = Path(__file__).resolve().parents[2]


def run_py(*arguments, **kwargs):
    line = [sys.executable, str(ROOT / "run.py"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=400, **kwargs)


@pytest.mark.slow
def test_demo_makes_a_video_with_sound(comfyui_tree, tmp_path):
    before = os.times()
    done = run_py("demo", "--comfyui", comfyui_tree.path, "--python", sys.executable, "--cpu", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # Processor time of the demo and its server, so that a busy machine does not fail it: four minutes of two cores.
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 480
    (video,) = tmp_path.glob("*.mp4")
    assert str(video) in done.stdout
    found = describe_video(video)
    assert {key: found[key] for key in EXPECTED} == EXPECTED
    assert (found["width"], found["height"], found["frames"], found["fps"]) == (64, 64, 5, 24)
    record = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])[0]
    assert record["steps"] >= 1 and len(record["video_sha256"]) == 64, record


def test_queue_sets_inputs_and_downloads_without_overwriting(server, tmp_path):
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}, "_meta": {"title": "Save"}},
        "3": {"class_type": "PrimitiveString", "inputs": {"value": "before"}},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}},
    }
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(graph), encoding="utf-8")
    changes = ("--set", "Save.filename_prefix=fox", "--set", "1.width=32", "--set", "PrimitiveString.value=7")
    for _ in range(2):
        done = run_py("queue", file, "--url", server.url, "--out", tmp_path / "out", *changes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "7"
    first, second = sorted((tmp_path / "out").iterdir())
    assert first.name.startswith("fox_") and second.name.startswith("fox_") and first != second
    from PIL import Image

    with Image.open(first) as picture:
        assert picture.size == (32, 64)


def test_queue_reports_a_failed_graph(server, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"1": {"class_type": "NoSuchNode", "inputs": {}}}), encoding="utf-8")
    done = run_py("queue", file, "--url", server.url, "--out", tmp_path)
    assert done.returncode == 1 and "NoSuchNode" in done.stderr


def test_queue_without_a_server_says_so(tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps({"1": {"class_type": "PreviewAny", "inputs": {}}}), encoding="utf-8")
    done = run_py("queue", file, "--url", "http://127.0.0.1:9", "--out", tmp_path)
    assert done.returncode == 1 and "no server answers at http://127.0.0.1:9" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server_and_no_folder(comfyui_tree, tmp_path, how):
    line = [sys.executable, str(ROOT / "run.py"), "demo", "--comfyui", str(comfyui_tree.path), "--python", sys.executable]
    process = subprocess.Popen(
        [*line, "--cpu", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        for text in process.stdout:
            if text.startswith("Up after"):
                break
        (server,) = [child for child in psutil.Process(process.pid).children() if "main.py" in child.cmdline()]
        process.send_signal(how)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode in (130, 143)
    assert not server.is_running()
    assert not list(tmp_path.glob("h3-vortex-*"))

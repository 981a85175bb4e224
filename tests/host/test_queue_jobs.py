"""``run.py queue`` with many jobs against real servers: records, a restart in the middle, and the same command again."""

import json
import subprocess
import sys
import time
from pathlib import Path

from h3_vortex.frontdoor import server as servers

ROOT = Path(__file__).resolve().parents[2]
GRAPH = {
    "1": {"class_type": "RandomNoise", "inputs": {"noise_seed": 1}},
    "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    "3": {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "x"}},
    "4": {"class_type": "EmptyImage", "inputs": {"width": 256, "height": 256, "batch_size": 8, "color": 0}},
    "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "jobs"}},
}


def command(url, folder, *more):
    (folder / "graph.json").write_text(json.dumps(GRAPH), encoding="utf-8")
    line = [sys.executable, str(ROOT / "run.py"), "queue", str(folder / "graph.json"), "--url", url, "--out", str(folder / "out")]
    return [*line, "--records", str(folder / "runs.jsonl"), *more]


def records(folder):
    path = folder / "runs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_a_restart_in_the_middle_loses_nothing(start_server, tmp_path, monkeypatch):
    with start_server() as first:
        process = subprocess.Popen(
            command(first.url, tmp_path, "--seeds", "1-30", "--wait", "240"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            end = time.monotonic() + 120
            while len(records(tmp_path)) < 2:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
        except BaseException:
            process.kill()
            raise
    before = records(tmp_path)
    assert len(before) < 30
    monkeypatch.setattr(servers, "free_port", lambda: first.port)
    with start_server() as second:
        assert second.url == first.url
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "The server went away" in err
        done = records(tmp_path)
        assert [record["seed"] for record in done] == list(range(1, 31)) and all(record["ok"] for record in done)
        assert done[: len(before)] == before and max(record["attempts"] for record in done) == 2
        # Every job fetches its own copy, also of a picture that the server took from its cache.
        files = [file for record in done for file in record["files"]]
        assert len(set(files)) == len(files) and all(Path(file).stat().st_size for file in files)

        again = subprocess.run(command(second.url, tmp_path, "--seeds", "1-31"), capture_output=True, text=True, timeout=120)
        assert again.returncode == 0 and again.stderr.count("finished before") == 30
        assert len(records(tmp_path)) == 31

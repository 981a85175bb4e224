"""The files of workflows/: up to date, consistent, complete, valid, and running on the tiny models."""

import importlib.util
import json
import os
import subprocess
import sys

import av
import pytest
from h3_vortex.tests.conftest import ROOT
from h3_vortex.tests.host.workflows import bundled, conftest

HUB = "https://huggingface.co/"
# In this order each graph finds the encoded prompt of the first one in the server's cache.
TEXT = ("turbo_4_steps", "turbo_8_steps", "long_clip_15_seconds", "compare_stock_and_accelerated", "text_to_video")
PICTURES = ("first_frame_to_video", "first_last_frame_to_video", "reference_image", "reference_image_and_voice", "reference_video")


@pytest.fixture(scope="module")
def info(running):
    return running.object_info()


def test_files_are_up_to_date(info):
    expected = bundled.files(info)
    if bundled.WRITE:
        for path, text in expected.items():
            (bundled.FOLDER / path).write_text(text, encoding="utf-8", newline="\n")
    for path, text in expected.items():
        assert (bundled.FOLDER / path).read_text(encoding="utf-8") == text, f"{path} is out of date: see workflows/source/graphs.py"
    assert {path.name for path in bundled.FOLDER.glob("*.json")} == {f"{name}.json" for name in bundled.NAMES}


@pytest.mark.parametrize("name", bundled.NAMES)
def test_canvas_file_is_consistent(info, name):
    graph = bundled.read(f"{name}.json")
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == graph["last_node_id"]
    for number, origin, slot, target, index, kind in graph["links"]:
        output, entry = nodes[origin]["outputs"][slot], nodes[target]["inputs"][index]
        assert number in output["links"] and entry["link"] == number
        assert kind == output["type"] and (entry["type"] in ("*", kind) or entry["type"].split(",").count(kind)), entry
    notes = [node for node in graph["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 2 and len(graph["groups"]) >= 3
    for node in graph["nodes"]:
        if node["type"] != "MarkdownNote":
            # Only core's nodes and this pack's: nothing else has to be installed.
            module = info[node["type"]]["python_module"]
            assert module == "nodes" or module.startswith("comfy_extras.") or module.endswith("ComfyUI-H3-Vortex"), module
        holders = [group for group in graph["groups"] if within(box(node), group["bounding"])]
        assert len(holders) == (node["type"] != "MarkdownNote"), node["type"]
    for number, one in enumerate(graph["nodes"]):
        for other in graph["nodes"][number + 1 :]:
            assert apart(box(one), box(other)), (one["type"], other["type"])


def box(node):
    return [*node["pos"], *node["size"]]


def within(inner, outer):
    return all(outer[i] <= inner[i] and inner[i] + inner[i + 2] <= outer[i] + outer[i + 2] for i in (0, 1))


def apart(one, other):
    return any(one[i] + one[i + 2] <= other[i] or other[i] + other[i + 2] <= one[i] for i in (0, 1))


@pytest.mark.parametrize("name", bundled.NAMES)
def test_every_model_file_has_its_address_and_folder(name):
    graph = bundled.read(f"{name}.json")
    offered = {model["name"]: model for node in graph["nodes"] for model in node["properties"].get("models", ())}
    chosen = {value for node in graph["nodes"] for value in node["widgets_values"] if str(value).endswith(".safetensors")}
    assert chosen == set(offered)
    text = "".join(node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote")
    for model in offered.values():
        assert model["url"].startswith(HUB) and model["url"].endswith("/" + model["name"])
        assert model["url"] in text and f"models/{model['directory']}" in text


def test_the_template_browser_lists_them(running):
    status, listed = running.get("/api/workflow_templates")
    assert status == 200 and sorted(listed["ComfyUI-H3-Vortex"]) == sorted(bundled.NAMES)
    for name in bundled.NAMES:
        status, graph = running.get(f"/api/workflow_templates/ComfyUI-H3-Vortex/{name}.json")
        assert status == 200 and graph == bundled.read(f"{name}.json")
        thumbnail = bundled.FOLDER / f"{name}.jpg"
        assert thumbnail.stat().st_size < 100_000


comfy_cli = pytest.mark.skipif(
    importlib.util.find_spec("comfy_cli") is None, reason="no comfy-cli: pip install comfy-cli==1.23.0 to check the workflows with it"
)


@comfy_cli
@pytest.mark.parametrize("name", bundled.NAMES)
def test_comfy_cli_converts_the_canvas_file_to_the_api_file(info, name, monkeypatch):
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    from comfy_cli.workflow_to_api import convert_ui_to_api

    assert convert_ui_to_api(bundled.read(f"{name}.json"), info) == bundled.read(f"api/{name}.json")


@comfy_cli
def test_comfy_cli_validates(info, tmp_path):
    (tmp_path / "object_info.json").write_text(json.dumps(bundled.with_files(info)), encoding="utf-8")
    for name in bundled.NAMES:
        answer = cli("workflow", "validate", "--workflow", ROOT / f"workflows/api/{name}.json", "--input", tmp_path / "object_info.json")
        found = json.loads(answer)["data"]
        assert found["valid"] and not found["errors"] and not found["warnings"], (name, found)


def cli(*arguments):
    line = [sys.executable, "-m", "comfy_cli", "--skip-prompt", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, "DO_NOT_TRACK": "1"}, cwd=ROOT, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PICTURES, *TEXT])
def test_it_makes_a_playable_video(running, name, tmp_path):
    if name in PICTURES and not conftest.ALL:
        pytest.skip("set H3_ALL_WORKFLOWS=1 to run the workflows with pictures too (a minute each on two idle cores)")
    result = running.queue(bundled.tiny(bundled.read(f"api/{name}.json")), timeout=1500)
    assert result.ok, result.message()
    check_film(running, result, tmp_path)
    if name.startswith("compare"):
        answers = [output["text"][0] for node, output in result.outputs.items() if title(name, node) in ("Same video?", "Same sound?")]
        assert answers == ["True", "True"]


def title(name, node):
    return bundled.read(f"api/{name}.json")[node]["_meta"]["title"]


def check_film(server, result, folder):
    ((_, entry),) = [found for found in result.files() if found[1]["filename"].endswith(".mp4")]
    with av.open(str(server.download(entry, folder))) as film:
        assert sum(1 for _ in film.decode(video=0)) == 5 and film.streams.video[0].width == 64
        assert film.streams.audio[0].rate == 32000

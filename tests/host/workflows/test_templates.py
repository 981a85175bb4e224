"""ComfyUI's own graphs for H3, from its template package, with H3 Accelerate put in front of whatever takes the model."""

import importlib.util
import json
from pathlib import Path

import pytest
from h3_vortex.tests.host.workflows import bundled, conftest
from h3_vortex.tests.host.workflows.test_bundled import check_film, cli

TEMPLATES = (
    "video_minimax_h3_t2v", "video_minimax_h3_i2v", "video_minimax_h3_r2v", "video_fastvideo_fasth3_t2v", "video_fastvideo_fasth3_i2v",
    "video_fasth3_ominiref_r2v", "video_minimax_h3_fun_controlnet_union",
)  # fmt: skip
TAKES_MODEL = ("BasicGuider", "BasicScheduler")
NEEDED = ("comfy_cli", "comfyui_workflow_templates_json")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install comfy-cli==1.23.0 comfyui-workflow-templates-json==0.1.123"
)


def convert(name, info):
    from comfy_cli.workflow_to_api import convert_ui_to_api

    folder = Path(importlib.util.find_spec("comfyui_workflow_templates_json").origin).parent / "templates"
    return convert_ui_to_api(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), info)


def accelerated(graph):
    """A copy with H3 Accelerate between each last MODEL and what samples with it."""
    graph = json.loads(json.dumps(graph))
    for node in [node for node in graph.values() if node["class_type"] in TAKES_MODEL]:
        origin = node["inputs"]["model"]
        key = f"h3_accelerate_{origin[0]}"
        graph[key] = {"class_type": "H3VortexAccelerate", "inputs": {"model": origin, "mode": "exact", "attention": "stock (exact)"}}
        node["inputs"]["model"] = [key, 0]
    return graph


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch):
    monkeypatch.setenv("DO_NOT_TRACK", "1")


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_still_validates(running, name, tmp_path):
    info = running.object_info()
    plain = convert(name, info)
    missing = {node["class_type"] for node in plain.values()} - set(info)
    graph = accelerated(plain)
    assert len(graph) > len(plain)
    (tmp_path / "info.json").write_text(json.dumps(info), encoding="utf-8")

    def complaints(graph):
        (tmp_path / "graph.json").write_text(json.dumps(graph), encoding="utf-8")
        data = json.loads(cli("workflow", "validate", "--workflow", tmp_path / "graph.json", "--input", tmp_path / "info.json"))["data"]
        # A file that is not on this server is no fault of the graph.
        return {(e["node_id"], e["code"]) for e in data["errors"] if "enum" not in e["code"] and "not_in_list" not in e["code"]}

    before = complaints(plain)
    assert complaints(graph) == before
    assert missing or not before, before


def shrink(graph):
    """The tiny models and sizes; media by the names of this server's input folder."""
    graph = bundled.tiny(graph)
    for node in graph.values():
        if node["class_type"] == "LoadImage":
            node["inputs"]["image"] = "example.png"
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video_minimax_h3_i2v", "video_minimax_h3_r2v", "video_minimax_h3_t2v"])
def test_it_runs(running, name, tmp_path):
    if name != "video_minimax_h3_t2v" and not conftest.ALL:
        pytest.skip("set H3_ALL_WORKFLOWS=1 to run the templates with pictures too (a minute each on two idle cores)")
    result = running.queue(shrink(accelerated(convert(name, running.object_info()))), timeout=1500)
    assert result.ok, result.message()
    check_film(running, result, tmp_path)


@pytest.mark.slow
def test_the_bundled_stock_graph_runs(running, tmp_path):
    result = running.queue(bundled.tiny(bundled.read("api/accelerate_stock_workflow.json")), timeout=1500)
    assert result.ok, result.message()
    check_film(running, result, tmp_path)

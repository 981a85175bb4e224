"""The pack in a real server: it loads, every node is listed and explained, and a refused graph says why."""

import importlib.util
import json
import threading
from pathlib import Path

import pytest
from h3_vortex.frontdoor.server import PACK_FOLDER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nodes_info(server):
    """node id -> its /object_info entry, for the nodes of this pack."""
    return {name: entry for name, entry in server.object_info().items() if name.startswith("H3Vortex")}


def test_pack_loads(server):
    status, stats = server.get("/system_stats")
    assert status == 200 and stats["system"]["comfyui_version"]
    (imported,) = [line for line in server.log.splitlines() if "seconds" in line and PACK_FOLDER in line]
    assert "IMPORT FAILED" not in imported, server.tail(60)


def test_every_node_of_the_extension_is_listed(nodes_info, comfy):
    import asyncio

    from h3_vortex.nodes import H3VortexExtension

    classes = asyncio.run(H3VortexExtension().get_node_list())
    assert sorted(nodes_info) == sorted(cls.define_schema().node_id for cls in classes)
    assert len(nodes_info) >= 4


def test_every_node_is_in_our_category_and_described(nodes_info):
    for name, entry in nodes_info.items():
        assert entry["category"].split("/")[0] == "H3 Vortex", name
        assert len(entry["description"]) > 20, name
        assert entry["display_name"].startswith("H3 "), name


def test_every_bundled_graph_names_nodes_that_exist(server):
    known = set(server.object_info())
    graphs = sorted((ROOT / "workflows" / "api").glob("*.json"))
    assert graphs
    for path in graphs:
        used = {node["class_type"] for node in json.loads(path.read_text(encoding="utf-8")).values()}
        assert used <= known, f"{path.name} uses {sorted(used - known)}"


def test_folders_of_the_pack_do_not_shadow_while_the_server_runs(server):
    """The server has ``nodes`` from ComfyUI: its core node classes come from there, and no pack module was found twice."""
    info = server.object_info()
    assert info["KSamplerSelect"]["python_module"] == "comfy_extras.nodes_custom_sampler"
    assert {entry["python_module"] for name, entry in info.items() if name.startswith("H3Vortex")} == {f"custom_nodes.{PACK_FOLDER}"}
    assert info["KSampler"]["python_module"] == "nodes"
    for name in ("kernels", "frontdoor"):
        assert importlib.util.find_spec(name) is None


def test_help_pages_are_served(server, nodes_info):
    for name in nodes_info:
        status, page = server.get(f"/extensions/{PACK_FOLDER}/docs/{name}/en.md")
        assert status == 200 and page.strip(), f"no help page for {name}"


def test_a_refused_graph_says_why(server):
    result = server.queue({"1": {"class_type": "H3VortexNoSuchNode", "inputs": {}}}, timeout=30)
    assert not result.ok and "H3VortexNoSuchNode" in result.message()
    result = server.queue({"1": {"class_type": "PreviewAny", "inputs": {}}}, timeout=30)
    assert not result.ok and list(result.node_errors) == ["1"] and "source" in result.message()


def test_a_failing_node_is_named(server):
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
        "2": {"class_type": "VAELoader", "inputs": {"vae_name": "minimax_h3_audio_vae_thin.pt"}},
        "3": {"class_type": "VAEEncode", "inputs": {"pixels": ["1", 0], "vae": ["2", 0]}},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}},
    }
    result = server.queue(graph, timeout=120)
    assert not result.ok and not result.interrupted
    assert result.error["node_id"] == "3" and "VAEEncode" in result.message()


def test_interrupt_then_queue_again(server):
    """The driver itself: an interrupted graph ends as interrupted, and the next one runs."""
    slow = {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": "minimax_h3_video_vae_thin.pt"}},
        "2": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 5, "color": 3}},
        "3": {"class_type": "VAEEncode", "inputs": {"pixels": ["2", 0], "vae": ["1", 0]}},
        "4": {"class_type": "PreviewAny", "inputs": {"source": ["3", 0]}},
    }

    def stop(kind, data):
        if kind == "executing" and data.get("node") == "1":
            threading.Thread(target=server.interrupt).start()

    result = server.queue(slow, timeout=120, on_event=stop)
    assert result.interrupted, result
    quick = {
        "1": {"class_type": "PrimitiveString", "inputs": {"value": "again"}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }
    assert server.queue(quick, timeout=30).texts() == ["again"]

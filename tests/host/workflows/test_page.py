"""The bundled workflows in ComfyUI's real page: they open clean, survive saving, run from the page, and every node has its help.

H3_WRITE_WORKFLOWS=1 also writes the pictures that the template browser shows.
"""

import time

import pytest
from h3_vortex.tests.conftest import ROOT
from h3_vortex.tests.host.workflows import bundled, page

pytestmark = pytest.mark.skipif(page.missing() is not None, reason=str(page.missing()))
PICTURE = ROOT / "docs" / "img"


# Playwright keeps an event loop in this thread while a tab is open: the server is asked by get_json, which needs none.
@pytest.fixture(scope="module")
def tab(running, tmp_path_factory):
    with page.pages(running.url, tmp_path_factory.mktemp("profile"), size=(1920, 1000)) as new:
        tab = new().open()
        assert not tab.errors
        yield tab


@pytest.mark.parametrize("name", bundled.NAMES)
def test_it_opens_clean_and_survives_saving(tab, name):
    tab.errors.clear()
    tab.load(bundled.read(f"{name}.json"), name)
    assert tab.evaluate("() => window.app.graph._nodes.filter(n => !window.LiteGraph.registered_node_types[n.type]).map(n => n.type)") == []
    small = "() => window.app.graph._nodes.filter(n => n.computeSize()[1] > n.size[1] + 1).map(n => n.title)"
    assert tab.evaluate(small) == []
    assert tab.exported() == bundled.read(f"api/{name}.json")
    if bundled.WRITE:
        tab.picture_of_graph(bundled.FOLDER / f"{name}.jpg")

    saved = tab.saved()
    tab.load(saved, f"{name} again")
    assert tab.exported() == bundled.read(f"api/{name}.json")
    again = tab.saved()
    assert [links(graph) for graph in (saved, again)] == [links(bundled.read(f"{name}.json"))] * 2
    assert tab.errors == []


def links(graph):
    """Links by the names of what they connect: an empty socket that the page adds moves numbers."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    return sorted((origin, nodes[origin]["outputs"][slot]["name"], target, nodes[target]["inputs"][index]["name"])
                  for _, origin, slot, target, index, _ in graph["links"])  # fmt: skip


def test_help_opens_for_every_node(running, tab):
    tab.load(bundled.read("text_to_video.json"), "help")
    tab.errors.clear()
    for name, node in running.get_json("/object_info").items():
        if not name.startswith("H3Vortex"):
            continue
        number = tab.evaluate(
            """type => {
              const node = window.LiteGraph.createNode(type)
              node.pos = [0, 3000]
              window.app.graph.add(node)
              return node.id
            }""",
            name,
        )
        text = tab.open_help(number)
        written = (ROOT / "web" / "docs" / name / "en.md").read_text(encoding="utf-8")
        assert text.startswith(written.splitlines()[0].removeprefix("# ")) and len(text) > len(written) / 2, name
        assert node["display_name"] in text
        tab.evaluate("id => window.app.graph.remove(window.app.graph.getNodeById(id))", number)
    assert tab.errors == []


@pytest.mark.slow
def test_a_job_queued_from_the_page_shows_its_video_and_what_the_nodes_did(running, tab):
    tab.load(bundled.read("text_to_video.json"), "job")
    tab.set_widgets(bundled.TINY, {**bundled.SMALL, "seed": 7})  # another seed than the runs before: nothing from the cache behind it
    tab.errors.clear()
    before = len(running.get_json("/history"))
    tab.tab.locator('[data-testid="queue-button"]').click()
    end = time.monotonic() + 1500
    while len(running.get_json("/history")) == before:
        assert time.monotonic() < end
        tab.tab.wait_for_timeout(500)
    job = list(running.get_json("/history").values())[-1]
    assert job["status"]["status_str"] == "success", job["status"]
    tab.fit()
    playing = "() => [...document.querySelectorAll('video')].some(v => v.readyState >= 2 && v.videoWidth === 64)"
    tab.tab.wait_for_function(playing, timeout=30_000)
    texts = tab.texts()
    assert texts["H3 Packed Denoiser"].startswith("2 steps in") and "64 x 64, 5 frames" in texts["H3 Decode"]
    assert texts["H3 Accelerate"].startswith("ran as stock" if not running_kernels(running) else "")
    assert tab.errors == []
    if bundled.WRITE:
        PICTURE.mkdir(parents=True, exist_ok=True)
        tab.picture_of_graph(PICTURE / "text_to_video_ran.jpg", width=1600)


def running_kernels(server):
    return server.get_json("/h3_vortex/status")["last_run"]["ops"]

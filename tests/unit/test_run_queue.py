"""``run.py queue``: reading graphs, --set, names and paths of outputs, error texts."""

import asyncio
import io
import json
import os

import pytest
from h3_vortex.frontdoor import cmd_queue
from h3_vortex.frontdoor.client import Result, output_path, safe_name
from h3_vortex.frontdoor.progress import Progress
from hypothesis import given
from hypothesis import strategies as st

GRAPH = {
    "3": {"class_type": "KSampler", "inputs": {"seed": 1, "cfg": 1.5, "name": "a", "on": True, "model": ["9", 0]}},
    "9": {"class_type": "Loader", "inputs": {}, "_meta": {"title": "H3 Load v1.0"}},
    "10": {"class_type": "Save", "inputs": {}, "_meta": {"title": "One"}},
    "11": {"class_type": "Save", "inputs": {}, "_meta": {"title": "Two"}},
}


@pytest.mark.parametrize(
    "text, node, name, value",
    [
        ("3.seed=7", "3", "seed", "7"),
        ("KSampler.name=a=b.c", "3", "name", "a=b.c"),
        ("H3 Load v1.0.file=x.safetensors", "9", "file", "x.safetensors"),
        ("9.ref_images.ref_image_0=cat.png", "9", "ref_images.ref_image_0", "cat.png"),
        ("Two.prefix=", "11", "prefix", ""),
    ],
)
def test_assignment(text, node, name, value):
    assert cmd_queue.parse_assignment(text, GRAPH) == (node, name, value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("3.seed", "is not NODE.INPUT=VALUE"),
        ("seed=4", "is not NODE.INPUT=VALUE"),
        ("4.seed=4", "no such node; there are 3 \\(KSampler\\), 9 \\('H3 Load v1.0', Loader\\)"),
        ("Save.prefix=x", "names 2 nodes; use an id: 10, 11"),
    ],
)
def test_bad_assignment_says_what_would_fit(text, says):
    with pytest.raises(cmd_queue.UsageError, match=says):
        cmd_queue.parse_assignment(text, GRAPH)


@pytest.mark.parametrize(
    "text, present, value",
    [
        ("7", 1, 7),
        ("0.5", 1.5, 0.5),
        ("7", "a", "7"),
        ("true", False, True),
        ('["4", 0]', ["9", 0], ["4", 0]),
        ('["4", 0]', 3, ["4", 0]),
        ("plain", None, "plain"),
        ("12", None, 12),
    ],
)
def test_value_keeps_the_kind_of_the_input(text, present, value):
    assert cmd_queue.parse_value(text, present, "n.i=v") == value


def test_a_word_for_a_number_is_refused():
    with pytest.raises(cmd_queue.UsageError, match="'3.seed=many': the input holds 1, so a value of type int is needed"):
        cmd_queue.parse_value("many", 1, "3.seed=many")


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[]", "is no API-format workflow"),
        ("{}", "is no API-format workflow"),
        ('{"nodes": [], "links": []}', "for the canvas; a server takes the API format"),
        ('{"1": {"inputs": {}}}', "node 1 has no class_type"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path, content, says):
    path = tmp_path / "graph.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(cmd_queue.UsageError, match=says):
        cmd_queue.load_graph(path)


def test_graph_is_read(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(GRAPH))
    assert cmd_queue.load_graph(path) == GRAPH


@pytest.mark.parametrize(
    "given_name, kept",
    [
        ("video_00001_.mp4", "video_00001_.mp4"),
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("C:evil.exe", "evil.exe"),
        ("/abs/x.png", "x.png"),
        ("..", "output"),
        ("", "output"),
        ("a\x00b\n.png", "a_b_.png"),
        ("con.png", "_con.png"),
        ("LPT1", "_LPT1"),
        (".hidden", "hidden"),
        ("file.mp4:stream", "stream"),
    ],
)
def test_names_from_a_server_become_plain_names(given_name, kept):
    assert safe_name(given_name) == kept


@given(st.text(max_size=40))
def test_no_name_leaves_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "out"
    path = output_path(folder, name)
    assert path.parent == folder and path.resolve().parent == folder.resolve()
    assert path.name not in (".", "..") and not set(path.name) & set("/\\:\x00")


def test_nothing_is_overwritten_or_followed(tmp_path):
    (tmp_path / "a.png").write_text("kept")
    assert output_path(tmp_path, "a.png").name == "a-2.png"
    (tmp_path / "a-2.png").write_text("kept")
    assert output_path(tmp_path, "x/a.png").name == "a-3.png"
    if os.name != "nt":
        (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
        assert output_path(tmp_path, "link.png").name == "link-2.png"


def test_errors_in_one_text():
    assert Result().message() == ""
    raised = {"node_id": "3", "node_type": "KSampler", "exception_type": "ValueError", "exception_message": "bad\n"}
    assert Result(error=raised).message() == "KSampler (node 3): ValueError: bad"
    stopped = Result(error={"type": "execution_interrupted", "node_id": "3", "node_type": "KSampler"})
    assert stopped.interrupted and "interrupted in KSampler (node 3)" in stopped.message()
    refused = Result(
        error={"type": "prompt_outputs_failed_validation", "message": "failed", "details": ""},
        node_errors={"3": {"class_type": "KSampler", "errors": [{"message": "too big", "details": "seed"}]}},
    )
    assert refused.message() == "failed\nKSampler (node 3): too big: seed"
    of_all = [{"type": "custom_validation_failed", "message": "refused", "details": f"{name} - width - 5"} for name in ("width", "height")]
    refused.node_errors = {"3": {"class_type": "KSampler", "errors": of_all}}
    assert refused.message() == "failed\nKSampler (node 3): refused: width - 5"


def test_files_put_saved_outputs_before_previews():
    result = Result(
        outputs={
            "1": {"images": [{"filename": "p.png", "type": "temp"}], "animated": (True,)},
            "2": {"images": [{"filename": "s.mp4", "type": "output"}], "text": ["hello", 3]},
        }
    )
    assert [entry["filename"] for _, entry in result.files()] == ["s.mp4", "p.png"]
    assert result.texts() == ["hello"]


def test_progress_prints_a_line_per_node_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(GRAPH, stream) as progress:
        progress("execution_cached", {"nodes": ["10"]})
        progress("executing", {"node": "9"})
        progress("progress", {"value": 1, "max": 4})
        progress("executing", {"node": "3"})
        progress("executing", {"node": None})
    assert [line.split(" s  ")[1] for line in stream.getvalue().splitlines()] == ["H3 Load v1.0", "KSampler"]


INFO = {"input": {"required": {"width": ["INT"], "ref_images": ["AUTOGROW"]}, "optional": {"seed": ["INT"]}}}


@pytest.mark.parametrize("name", ["width", "seed", "ref_images.ref_image_0"])
def test_inputs_that_the_node_has_are_taken(name):
    assert cmd_queue.input_problem(name, f"1.{name}=3", "Node", INFO) is None


def test_a_misspelt_input_is_named_with_the_ones_there_are():
    problem = cmd_queue.input_problem("widht", "1.widht=3", "Node", INFO)
    assert problem == "'1.widht=3': Node has no input 'widht'; it has width, ref_images, seed"


def test_a_class_that_the_server_does_not_know_is_left_to_its_own_refusal():
    assert cmd_queue.input_problem("widht", "1.widht=3", "Node", None) is None


def test_a_misspelt_input_is_refused_before_anything_is_queued(monkeypatch, capsys):
    from types import SimpleNamespace

    from h3_vortex.frontdoor import client

    class Server:
        def __init__(self, url):
            pass

        async def __aenter__(self):
            return self

        async def __aexit__(self, *exc):
            pass

        async def get(self, path):
            assert path == "/object_info/Node"
            return 200, {"Node": INFO}

    monkeypatch.setattr(client, "Client", Server)
    graph, args = {"1": {"class_type": "Node", "inputs": {"widht": 3}}}, SimpleNamespace(url="http://127.0.0.1:1")
    assert asyncio.run(cmd_queue._queue(graph, {("1", "widht"): "1.widht=3"}, [], None, None, args)) == 2
    assert "has no input 'widht'" in capsys.readouterr().err

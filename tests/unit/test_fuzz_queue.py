"""``run.py queue`` with workflow files, assignments and server-given names of any content."""

import json
import os
from pathlib import Path

import pytest
from h3_vortex.frontdoor import client, cmd_queue
from h3_vortex.tests.fuzz import budget
from hypothesis import given
from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)
NODE = st.fixed_dictionaries(
    {},
    optional={
        "class_type": st.sampled_from(["KSampler", "A.B", "H3VortexLoad"]) | VALUES,
        "inputs": st.dictionaries(st.sampled_from(["seed", "text", "a.b", "ref.ref_0"]) | st.text(max_size=5), VALUES, max_size=4) | VALUES,
        "_meta": st.fixed_dictionaries({}, optional={"title": st.sampled_from(["Seed", "A.B", "1"]) | VALUES}) | VALUES,
    },
)
GRAPH = st.dictionaries(st.sampled_from(["1", "2", "A.B", "nodes", "links"]) | st.text(max_size=4), NODE | VALUES, max_size=4)
TARGETS = st.builds(
    "{}.{}{}".format,
    st.sampled_from(["1", "A.B", "Seed", "KSampler", "3", ""]),
    st.sampled_from(["seed", "a.b", "", "x"]),
    st.sampled_from(["=7", "=", "", "=a=b", "=[1"]),
)


@budget(200)
@given(
    st.one_of(GRAPH.map(json.dumps).map(str.encode), VALUES.map(json.dumps).map(str.encode), st.binary(max_size=30)),
    st.lists(TARGETS | st.text(max_size=12), max_size=3),
)
def test_any_file_is_a_graph_or_a_usage_error(tmp_path_factory, data, assignments):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(data)
    try:
        graph = cmd_queue.load_graph(path)
    except cmd_queue.UsageError as error:
        assert str(path) in str(error)
        return
    before = json.dumps(graph)
    for text in assignments:
        try:
            node, name, value = cmd_queue.parse_assignment(text, graph)
            graph[node]["inputs"][name] = cmd_queue.parse_value(value, graph[node]["inputs"].get(name), text)
        except cmd_queue.UsageError as error:
            assert repr(text)[1:-1] in str(error) or text.partition("=")[0].rpartition(".")[0][:1] in str(error)
    assert set(json.loads(json.dumps(graph))) == set(json.loads(before))


def test_a_file_nested_beyond_all_measure(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text('{"1":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(cmd_queue.UsageError, match="deep.json"):
        cmd_queue.load_graph(path)


@budget(200)
@given(
    st.text(max_size=40)
    | st.builds(
        "".join,
        st.lists(
            st.sampled_from(["..", "/", "\\", "C:", "con", ".", "%2e", "~", "a", ".mp4", "\0", "\n", " ", "aux.", ":s", "|"]), max_size=8
        ),
    )
)
def test_no_server_given_name_leaves_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp() / "out"
    path = client.output_path(folder, name)
    assert path.parent == folder and path.resolve().parent == folder.resolve() and not path.exists()
    assert os.fsencode(path.name) and path.name not in (".", "..") and "\0" not in path.name
    assert Path(path.name).name == path.name


@budget(100)
@given(VALUES | st.dictionaries(st.just("1"), st.dictionaries(st.sampled_from(["text", "images"]), VALUES)), VALUES)
def test_results_of_any_shape_are_told(outputs, error):
    """What a server, or something that answers in its place, puts into history and errors."""
    result = client.Result(outputs=outputs if isinstance(outputs, dict) else {"1": outputs})
    assert isinstance(result.texts(), list) and isinstance(result.files(), list)
    result.error = error if isinstance(error, dict) else {"type": "x", "details": error}
    assert isinstance(result.message(), str)

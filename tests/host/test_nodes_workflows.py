"""The bundled API graphs through a real server: text to MP4, frames, references, and mixed with core's nodes."""

import json

import av
import pytest
from h3_vortex.tests.conftest import ROOT

GRAPHS = sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json"))
# in this order the second graph finds the first one's encoded prompt in the server's cache
TINY = ("demo_t2va", "mixed_with_core", "demo_fl2va", "demo_ref2va")


def graph(name):
    return json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_use_known_nodes_and_inputs(server, name):
    info = server.object_info()
    for node_id, node in graph(name).items():
        assert node["class_type"] in info, f"{name}: {node_id} is {node['class_type']}, which this server does not have"
        known = info[node["class_type"]]["input"]
        inputs = {**known.get("required", {}), **known.get("optional", {})}
        for given in node["inputs"]:
            assert given.split(".")[0] in inputs, f"{name}: {node_id} has no input {given}"


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_graph_makes_a_playable_video(server, name, tmp_path):
    result = server.queue(graph(name), timeout=900)
    assert result.ok, result.message()
    ((node, entry),) = [found for found in result.files() if found[1]["filename"].endswith(".mp4")]
    assert node == "save"
    with av.open(str(server.download(entry, tmp_path))) as movie:
        (video,), (audio,) = movie.streams.video, movie.streams.audio
        assert (video.codec_context.name, video.width, video.height) == ("h264", 64, 64)
        assert float(video.average_rate) == 24
        assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", 32000, 2)
        assert sum(1 for _ in movie.decode(video=0)) == 5
        movie.seek(0)
        samples = sum(frame.samples for frame in movie.decode(audio=0))
        assert abs(samples / 32000 - 5 / 24) < 0.05

    record = json.loads(result.outputs["denoise"]["text"][0])
    steps = graph(name)["sigmas"]["inputs"]["steps"]
    assert record["steps"] == len(record["step_ms"]) == steps and all(ms > 0 for ms in record["step_ms"])
    assert len(record["video_sha256"]) == len(record["audio_sha256"]) == 64
    assert record["seed"] == 42 and record["versions"]["comfyui"]
    if "decode" in graph(name):
        assert "64 x 64, 5 frames = 0.208 s" in result.outputs["decode"]["text"][0]
    progress = [e["data"] for e in result.events if e["type"] == "progress" and e["data"].get("node") == "denoise"]
    # Another graph of this server may have made the same conditioning before: then the node did not run and says nothing.
    cached = {at for event in result.events if event["type"] == "execution_cached" for at in event["data"]["nodes"]}
    assert "conditioning" in cached or "packed rows: " in result.outputs["conditioning"]["text"][0]
    assert progress and progress[-1]["value"] == progress[-1]["max"] == steps
    assert not list((server.base / "output" / "h3_vortex_latents").glob("*"))

"""One server for the tests of workflows: the tiny models, a tiny Turbo file, media to choose, and the real page where it is installed."""

import os
import shutil

import av
import numpy as np
import pytest
from h3_vortex.frontdoor.server import prepare_base
from h3_vortex.tests.host import turbo_file
from h3_vortex.tests.host.workflows import bundled, page
from h3_vortex.workflows.source import graphs

# A text with pictures costs the tiny text encoder a minute of two cores; the workflows that have them are run on request.
ALL = bool(os.environ.get("H3_ALL_WORKFLOWS"))

REFERENCES_TURBO = "minimax_h3_ref2v_turbo_4step_v0.1_comfyui_bf16.safetensors"  # of the official template with references


@pytest.fixture(scope="session")
def workflow_base(comfyui_tree, tiny_models, tmp_path_factory):
    base = prepare_base(tmp_path_factory.mktemp("workflow-base"))
    models = base / "models"
    for key in ("pruned_int8_convrot", "text_encoder", "video_vae", "audio_vae"):
        source = tiny_models[key]
        (models / source.parent.name).mkdir(exist_ok=True)
        shutil.copy(source, models / source.parent.name)
    turbo_file.write(models)
    for name in (graphs.TURBO_8, REFERENCES_TURBO):
        shutil.copy(models / "loras" / turbo_file.EIGHT, models / "loras" / name)
    # The files that the workflows name, empty: there to choose on the canvas, never loaded.
    for name in bundled.NAMES:
        for node in bundled.read(f"{name}.json")["nodes"]:
            for model in node["properties"].get("models", ()):
                (models / model["directory"] / model["name"]).touch()
    shutil.copy(comfyui_tree.path / "input" / "example.png", base / "input")
    _write_voice(base / "input" / "voice.mp3")
    _write_film(base / "input" / "reference.mp4")
    return base


@pytest.fixture(scope="session")
def running(start_server, workflow_base):
    flags = () if page.missing() else ("--front-end-root", str(page.root()))
    with start_server(*flags, base=workflow_base) as server:
        yield server


def _write_voice(path, seconds=1, rate=44100):
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mp3", rate=rate, layout="mono")
        wave = (np.sin(np.arange(seconds * rate) * 440 * 2 * np.pi / rate) * 0.3).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
        frame.rate = rate
        file.mux([*stream.encode(frame), *stream.encode(None)])


def _write_film(path, frames=48, rate=44100):
    with av.open(str(path), "w") as file:
        video = file.add_stream("h264", rate=24)
        video.width, video.height = 128, 64
        audio = file.add_stream("aac", rate=rate, layout="mono")
        for number in range(frames):
            picture = np.full((64, 128, 3), number * 5, np.uint8)
            file.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        sound = av.AudioFrame.from_ndarray(np.zeros((1, frames * rate // 24), np.float32), format="fltp", layout="mono")
        sound.rate = rate
        file.mux([*video.encode(None), *audio.encode(sound), *audio.encode(None)])

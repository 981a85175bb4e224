"""The bundled workflows for tests: where they are, what they should hold, and how to run one on the tiny models."""

import json
import os

from h3_vortex.tests.conftest import ROOT
from h3_vortex.workflows.source import canvas, graphs

FOLDER = ROOT / "workflows"
NAMES = [workflow.name for workflow in graphs.WORKFLOWS]
WRITE = bool(os.environ.get("H3_WRITE_WORKFLOWS"))
TINY = {
    graphs.FL2VA: "minimax_h3_tiny_pruned_int8_convrot.safetensors",
    graphs.REF2VA: "minimax_h3_tiny_pruned_int8_convrot.safetensors",
    graphs.TEXT_ENCODER: "qwen3vl_32b_minimax_h3_thin.pt",
    graphs.VIDEO_VAE: "minimax_h3_video_vae_thin.pt",
    graphs.AUDIO_VAE: "minimax_h3_audio_vae_thin.pt",
}
SMALL = {"width": 64, "height": 64, "frames": 5, "length": 5, "seconds": 0.0, "steps": 2, "prompt": "A red kite over a beach."}


def files(object_info):
    """{path below workflows/: text} as the description and this server's nodes give them."""
    texts = {}
    for workflow in graphs.WORKFLOWS:
        texts[f"{workflow.name}.json"] = _text(canvas.to_canvas(workflow, object_info))
        texts[f"api/{workflow.name}.json"] = _text(canvas.to_api(workflow, object_info))
    return texts


def read(path):
    return json.loads((FOLDER / path).read_text(encoding="utf-8"))


def tiny(graph):
    """A copy of an API graph with the tiny models, and 5 frames of 64 x 64 in 2 steps (a Turbo file: in its own) from one prompt."""
    graph = json.loads(json.dumps(graph))
    for node in graph.values():
        for name, value in node["inputs"].items():
            if name in SMALL and not (name == "steps" and value == 0):
                node["inputs"][name] = SMALL[name]
            elif isinstance(value, str) and value in TINY:
                node["inputs"][name] = TINY[value]
    return graph


def with_files(object_info):
    """A copy of /object_info in which every file that the workflows name is there to choose."""
    info = json.loads(json.dumps(object_info))
    for name in NAMES:
        for node in read(f"api/{name}.json").values():
            declared = info[node["class_type"]]["input"]
            for given, value in node["inputs"].items():
                spec = {**declared.get("required", {}), **declared.get("optional", {})}.get(given)
                if spec is None or not isinstance(value, str):
                    continue
                options = spec[0] if isinstance(spec[0], list) else spec[1].get("options") if spec[0] == "COMBO" else None
                if options is not None and value not in options and "." in value:
                    options.append(value)
    return info


def _text(data):
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

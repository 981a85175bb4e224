"""The bundled workflows for tests: where they are, and how to run one on the tiny models."""

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
    """A copy of an API graph with the tiny models and 5 frames of 64 x 64 in at most 2 steps."""
    graph = json.loads(json.dumps(graph))
    for node in graph.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                continue
            if name in SMALL and not (name == "steps" and value == 0):  # 0: as many steps as the LoRA's preset says
                node["inputs"][name] = SMALL[name]
            elif value in TINY:
                node["inputs"][name] = TINY[value]
    return graph


def _text(data):
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

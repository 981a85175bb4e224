"""Nodes for a server under test: conditioning without a text encoder, the patch with its references allowed, and results as text.

Copied into the server's ``custom_nodes`` by ``test_accelerate_http.py``; never shipped to a user's ComfyUI by itself.
"""

import hashlib
import json
import sys

from . import sampling, w4a4


def pack(name):
    """A module of the pack, which the server imported under the path of its folder."""
    return next(module for key, module in sys.modules.items() if key.endswith(f".{name}"))


class Node:
    CATEGORY = "H3 test"
    FUNCTION = "run"


class Conditioning(Node):
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"kinds": ("STRING", {"default": "all"})}}

    def run(self, kinds):
        return (sampling.conditioning(kinds),)


class Eager(Node):
    """H3 Accelerate as on a machine whose every kernel is the reference."""

    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        comfyui = pack("kernels.patch.comfyui")
        return (comfyui.accelerate(model, comfyui.Features(allow_eager=True)),)


class W4A4(Node):
    """NVFP4 layers of the model compute with quantised activations from here on, through a reference GEMM."""

    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def run(self, model):
        w4a4.register()
        for layer in model.model.diffusion_model.modules():
            if getattr(layer, "quant_format", None) == "nvfp4":
                layer._full_precision_mm = False
        return (model.clone(),)


class Result(Node):
    """SHA-256 of each stream of a latent, and the report of the model that made it (null for a plain model)."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "model": ("MODEL",)}}

    def run(self, latent, model):
        streams = [t.contiguous().cpu() for t in latent["samples"].unbind()]
        digests = [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in streams]
        session = pack("kernels.patch.comfyui").session_of(model)
        report = None if session is None else session.report()
        return {"ui": {"text": [json.dumps({"sha256": digests, "std": [float(t.std()) for t in streams], "report": report})]}}


NODE_CLASS_MAPPINGS = {f"H3Test{cls.__name__}": cls for cls in (Conditioning, Eager, W4A4, Result)}

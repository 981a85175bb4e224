"""H3 Accelerate: the pack's kernels in the model that goes through, on its clone alone."""

import json
from dataclasses import replace

from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

from ..kernels import attention as attentions
from ..kernels.patch.comfyui import Features, accelerate, report, session_of
from ..kernels.patch.report import glance
from . import checks, host

NODE = "H3 Accelerate"
SHOW_KEY = "h3_vortex_show_report"
SWITCHES = {
    "norm": "RMSNorm, modulation and the gate in front of them in one pass.",
    "gate": "The gated residual in one pass over all segments.",
    "rope": "Per-head RMSNorm and rotation of q and k in one pass.",
    "swiglu": "SwiGLU in one pass.",
    "v_view": "Attention reads v where the projection left it, without a copy.",
    "nvfp4": "NVFP4 checkpoints: activations are quantised while they are produced.",
    "int8": "INT8-ConvRot checkpoints: activations are rotated and quantised while they are produced.",
    "schedule": "NVFP4 checkpoints: products take a cuBLASLt schedule that a short search proved equal and faster on this GPU.",
}


class H3VortexAccelerate(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexAccelerate",
            display_name="H3 Accelerate",
            category="H3 Vortex",
            description="Run MiniMax H3 with this pack's kernels: the same frames and sound as without it, byte for byte, in less time. "
            "Put it between the model (with its LoRAs) and the guider. Whatever cannot run here takes ComfyUI's own code.",
            search_aliases=["minimax", "h3", "speed", "fast", "kernels", "optimize", "torch compile"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax H3 diffusion model, with its LoRAs and other patches applied."),
                io.Combo.Input(
                    "mode",
                    options=["exact", "off", "advanced"],
                    default="exact",
                    tooltip="exact: every kernel that gives stock's bytes. off: the model passes untouched. advanced: the switches below.",
                ),
                io.Combo.Input(
                    "attention",
                    options=list(attentions.CHOICES),
                    default=attentions.STOCK,
                    tooltip="stock: the attention that ComfyUI's flags, nodes or the checkpoint chose. fastest dense: the installed "
                    "backends, timed once on this GPU at this shape; not stock's bytes, error shown. A name: that backend, or an error.",
                ),
                *(
                    io.Boolean.Input(name, default=True, optional=True, advanced=True, tooltip=f"{text} Only read in advanced mode.")
                    for name, text in SWITCHES.items()
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Model.Output(display_name="model", tooltip="A clone with the kernels; in mode off the very model that came in."),
                io.String.Output(
                    display_name="report",
                    tooltip="JSON: the model's layers and what its kernels did so far. After a run, with how much of the model was on the "
                    "GPU: on the node, in the log, and at /h3_vortex/status.",
                ),
            ],
        )

    @classmethod
    def execute(cls, model, mode, attention, **switches):
        checks.h3_model(NODE, "model", model)
        if mode == "off":
            host.show(host.node_id(cls), "off: the model passes untouched")
            return io.NodeOutput(model, json.dumps({"mode": "off"}))
        if attention not in attentions.CHOICES:
            raise ValueError(f"{NODE}: attention {attention!r} is not one of {', '.join(attentions.CHOICES)}: choose one of them")
        features = replace(Features(), **switches) if mode == "advanced" else Features()
        patched = accelerate(model, features, attention, mode)
        patched.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, SHOW_KEY)  # of an H3 Accelerate before this one
        patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, SHOW_KEY, _show_after(session_of(patched), host.node_id(cls)))
        return io.NodeOutput(patched, json.dumps(report(patched)))


def _show_after(session, node):
    """A wrapper around a whole sampling run that shows on the node what its kernels did, also when the run was interrupted."""

    def run(executor, *args, **kwargs):
        try:
            return executor(*args, **kwargs)
        finally:
            host.show(node, glance(session.report()))

    return run

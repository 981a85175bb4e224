"""H3 Warmup: everything that a first run would pay for, done before it."""

import json
import logging

import comfy.model_management
import torch
from comfy_api.latest import io, ui
from comfy_extras.nodes_custom_sampler import BasicGuider, DisableNoise, KSamplerSelect, SamplerCustomAdvanced

from ..kernels.patch.comfyui import session_of
from ..kernels.patch.report import glance, mark_warm
from . import checks, host

log = logging.getLogger("h3_vortex")
NODE = "H3 Warmup"


class H3VortexWarmup(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexWarmup",
            display_name="H3 Warmup",
            category="H3 Vortex",
            description="Load the model, compile and verify its kernels, time them, and run one step at the workflow's shape. The model "
            "passes unchanged; the latent of that step is thrown away. For servers that must answer the first job at full speed.",
            search_aliases=["minimax", "h3", "preload", "compile", "ready"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The model of H3 Accelerate."),
                io.Conditioning.Input("positive", tooltip="The conditioning of the workflow: its length belongs to the shape."),
                io.Latent.Input("latent", tooltip="The empty latent of the workflow: size and length belong to the shape."),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The very model that came in."),
                io.String.Output(
                    display_name="report",
                    tooltip="JSON: kernels used and stock calls with their reasons, verdicts, and milliseconds of stock and of the kernel.",
                ),
            ],
        )

    @classmethod
    def execute(cls, model, positive, latent):
        checks.h3_model(NODE, "model", model)
        checks.connected(NODE, "positive", positive, "the conditioning of H3 Conditioning")
        video, _ = checks.h3_latent(NODE, "latent", latent)
        checks.batch_of_one(NODE, "latent", video)

        session = session_of(model)
        (guider,) = BasicGuider.execute(model, positive).result
        (noise,) = DisableNoise.execute().result
        (sampler,) = KSamplerSelect.execute("euler").result
        one_step = torch.tensor([1.0, 0.0])  # H3's sigmas run from 1 to 0 whatever its shift
        if session is not None:
            session.measuring = True
        try:
            SamplerCustomAdvanced.execute(noise, guider, sampler, one_step, latent)
        finally:
            if session is not None:
                session.measuring = False
        comfy.model_management.soft_empty_cache()
        if session is None:
            text = json.dumps({"mode": "off", "note": "the model did not come from H3 Accelerate: it is loaded, no kernel was used"})
        else:
            text = json.dumps(session.report())
        mark_warm()
        log.info("H3 Warmup: ready")
        host.show(host.node_id(cls), "ready" if session is None else f"ready\n{glance(session.report())}")
        return io.NodeOutput(model, text, ui=ui.PreviewText(text))

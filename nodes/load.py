"""H3 Load: the four files of MiniMax H3 in one node, each looked at before it is loaded."""

import logging

import comfy.model_management
import folder_paths
import torch
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

import nodes

from ..h3 import checkpoint
from . import host

log = logging.getLogger("h3_vortex")

NONE = "none"
OUTPUTS = {checkpoint.DIFFUSION_MODEL: 0, checkpoint.TEXT_ENCODER: 1, checkpoint.VIDEO_VAE: 2, checkpoint.AUDIO_VAE: 3}
FOLDERS = {
    checkpoint.DIFFUSION_MODEL: "diffusion_models",
    checkpoint.TEXT_ENCODER: "text_encoders",
    checkpoint.VIDEO_VAE: "vae",
    checkpoint.AUDIO_VAE: "vae",
}


class H3VortexLoad(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        def choice(slot, tooltip):
            options = [NONE, *folder_paths.get_filename_list(FOLDERS[slot])]
            return io.Combo.Input(slot, options=options, tooltip=f"{tooltip} Choose {NONE} to leave it out.")

        return io.Schema(
            node_id="H3VortexLoad",
            display_name="H3 Load",
            category="H3 Vortex",
            description="Load the diffusion model, the text encoder and both VAEs of MiniMax H3, and say how they are stored. "
            "A truncated file or a file in the wrong place is named before anything is loaded.",
            search_aliases=["minimax", "h3", "load diffusion model", "load clip", "load vae"],
            inputs=[
                choice(
                    checkpoint.DIFFUSION_MODEL,
                    "The DiT, from models/diffusion_models: fl2va for text and frames, ref2va for "
                    "references; full or pruned; bf16, fp8, int8_convrot or nvfp4.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
                    advanced=True,
                    tooltip="How to keep weights that are stored unquantised. 'default' keeps the file's own; fp8 halves "
                    "the memory of a bf16 file and changes the result.",
                ),
                choice(checkpoint.TEXT_ENCODER, "Qwen3-VL 32B cut to 50 layers, from models/text_encoders."),
                choice(checkpoint.VIDEO_VAE, "The video VAE, from models/vae."),
                choice(checkpoint.AUDIO_VAE, "The audio VAE, from models/vae."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The diffusion model."),
                io.Clip.Output(display_name="clip", tooltip="The text encoder."),
                io.Vae.Output(display_name="vae", tooltip="The video VAE."),
                io.Vae.Output(display_name="audio_vae", tooltip="The audio VAE."),
                io.String.Output(
                    display_name="info", tooltip="What was loaded: form, size, how the layers are stored; RAM and VRAM beside it."
                ),
            ],
        )

    @classmethod
    def execute(cls, diffusion_model, weight_dtype, text_encoder, video_vae, audio_vae):
        chosen = {
            checkpoint.DIFFUSION_MODEL: diffusion_model,
            checkpoint.TEXT_ENCODER: text_encoder,
            checkpoint.VIDEO_VAE: video_vae,
            checkpoint.AUDIO_VAE: audio_vae,
        }
        _refuse_empty_outputs(chosen, cls.hidden.prompt, cls.hidden.unique_id)
        headers = {slot: _inspect(slot, name) for slot, name in chosen.items() if name != NONE}
        info = _describe(headers) if headers else "nothing was chosen"
        log.info("H3 Load\n%s", info)

        load = {
            checkpoint.DIFFUSION_MODEL: lambda name: nodes.UNETLoader().load_unet(name, weight_dtype)[0],
            checkpoint.TEXT_ENCODER: lambda name: nodes.CLIPLoader().load_clip(name, type="minimax")[0],
            checkpoint.VIDEO_VAE: lambda name: nodes.VAELoader().load_vae(name)[0],
            checkpoint.AUDIO_VAE: lambda name: nodes.VAELoader().load_vae(name)[0],
        }
        # an output without a file stops whatever is connected to it later, while this result is still cached
        loaded = [load[slot](name) if name != NONE else ExecutionBlocker(_empty(slot)) for slot, name in chosen.items()]
        return io.NodeOutput(*loaded, info, ui=host.shown(cls, info))


def _describe(headers):
    """What the files are, a warning where torch is too old for them, this machine's memory beside their size, and what was checked."""
    lines = [checkpoint.describe(header) for header in headers.values()]
    warnings = [checkpoint.cuda_warning(header, torch.__version__, torch.version.cuda) for header in headers.values()]
    lines += filter(None, warnings)
    total = sum(header.gigabytes for header in headers.values())
    model = headers.get(checkpoint.DIFFUSION_MODEL)
    share = f", the diffusion model {model.gigabytes:.3g} GB of it" if model else ""
    lines.append(f"memory before loading: {_memory()}; the files: {total:.3g} GB{share}")
    lines.append("checked: header and length; no SHA-256, which would read every file a second time")
    return "\n".join(lines)


def _memory():
    management = comfy.model_management
    device = management.get_torch_device()
    parts = [f"RAM {_room(torch.device('cpu'))}"]
    pinned = getattr(management, "MAX_PINNED_MEMORY", -1)  # -1: pinning is off; not every core has it
    if pinned > 0:
        parts.append(f"of which ComfyUI pins at most {pinned / 1e9:.1f} GB")
    parts.append("no GPU" if device.type == "cpu" else "shared with the GPU" if device.type == "mps" else f"VRAM {_room(device)}")
    return ", ".join(parts)


def _room(device):
    """``device``'s memory as ComfyUI counts it."""
    total, free = comfy.model_management.get_total_memory(device), comfy.model_management.get_free_memory(device)
    return f"{total / 1e9:.1f} GB ({free / 1e9:.1f} free)"


def _empty(slot):
    return f"H3 Load: '{slot}' is {NONE} but its output is used: choose a file there, or disconnect it"


def _refuse_empty_outputs(chosen, prompt, node_id):
    """Stop here, at the node where the file is missing, rather than at the node that would have used it."""
    links = [
        tuple(value)
        for node in (prompt or {}).values()
        for value in node.get("inputs", {}).values()
        if isinstance(value, list) and len(value) == 2
    ]
    for slot, name in chosen.items():
        if name == NONE and (str(node_id), OUTPUTS[slot]) in links:
            raise ValueError(_empty(slot))


def _inspect(slot, name):
    header = checkpoint.read_header(folder_paths.get_full_path_or_raise(FOLDERS[slot], name))
    checkpoint.check_slot(header, slot)
    return header

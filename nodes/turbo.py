"""H3 Turbo LoRA: a LoRA beside the model's layers, and the steps, shifts and sampler that its file wants."""

import hashlib
import logging

import comfy.utils
import folder_paths
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from safetensors import safe_open

from ..h3 import adaln, presets, sigmas, turbo
from ..kernels.patch import side_path
from . import checks, host, sampler

log = logging.getLogger("h3_vortex")
NODE = "H3 Turbo LoRA"
AUTO, NONE = "auto (from the file)", "none"
WATCH_KEY = "h3_vortex_turbo_schedule"


class H3VortexTurboLora(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexTurboLora",
            display_name="H3 Turbo LoRA",
            category="H3 Vortex",
            description="Put a LoRA beside the layers of MiniMax H3 without touching its weights: exact on NVFP4, INT8, FP8 and bf16. For "
            "Turbo files it also gives the sigmas and the sampler that the file was trained for.",
            search_aliases=["minimax", "h3", "lora", "turbo", "lightning", "distill", "4 step", "8 step", "lora loader"],
            inputs=[
                io.Model.Input("model", tooltip="A MiniMax H3 diffusion model, before or after H3 Accelerate and other LoRAs."),
                io.Combo.Input(
                    "lora",
                    options=folder_paths.get_filename_list("loras"),
                    tooltip="A LoRA for H3 from models/loras: ComfyUI's, diffusers', native or flattened key names.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.01,
                    tooltip="Factor on the LoRA. 0: no LoRA, the same bytes as without it; shifts, sigmas and sampler stay the preset's.",
                ),
                io.Combo.Input(
                    "preset",
                    options=[AUTO, *presets.CHOICES],
                    default=AUTO,
                    tooltip="Steps and shifts of video/sound. auto: by the file's name or content; an unknown file says so in the info.",
                ),
                io.Int.Input("steps", default=0, min=0, max=200, advanced=True, tooltip="Above 0: so many steps instead of the preset's."),
                io.Float.Input(
                    "shift_video",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Above 0: this flow shift of the video instead of the preset's.",
                ),
                io.Float.Input(
                    "shift_audio",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Above 0: this flow shift of the sound instead of the preset's.",
                ),
                io.Combo.Input(
                    "adaln_source",
                    options=[NONE, *folder_paths.get_filename_list("diffusion_models")],
                    default=NONE,
                    advanced=True,
                    tooltip="For a pruned model and a LoRA with AdaLN pairs: the full checkpoint that the model was pruned from. Only its "
                    "time embedder is read.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Model.Output(display_name="model", tooltip="A clone with the LoRA and the shifts; the model that came in stays."),
                io.Sigmas.Output(display_name="sigmas", tooltip="The sigmas of the preset."),
                io.Sampler.Output(display_name="sampler", tooltip="The sampler of the preset: video and sound each on its own clock."),
                io.String.Output(display_name="info", tooltip="What was found in the file, what was applied, and with which settings."),
            ],
        )

    @classmethod
    def execute(cls, model, lora, strength, preset, steps, shift_video, shift_audio, adaln_source):
        checks.h3_model(NODE, "model", model)
        path = folder_paths.get_full_path_or_raise("loras", lora)
        found, how = presets.choose(lora, lambda: _sha256(path))
        chosen = found if preset == AUTO else presets.CHOICES[preset]
        lines = [f"settings: {how if preset == AUTO else 'chosen on the node'}"]
        if chosen.note:
            lines.append(f"note: {chosen.note}")

        tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
        try:
            file = turbo.read(tensors, metadata, found.alpha)
            adapters, remarks = _fit(model, file, adaln_source)
        except ValueError as error:
            raise ValueError(f"{NODE}: {lora}: {error}") from error
        patched = side_path.attach(model, adapters, strength)
        patched = sampler.set_shifts(patched, shift_video or chosen.shift_video, shift_audio or chosen.shift_audio)
        video, audio = sampler.shifts_of(patched)
        grid = chosen.sigmas(steps, video)
        warning = presets.schedule_warning(chosen, len(grid) - 1)
        if strength != 0:
            patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, WATCH_KEY, _watch_schedule(chosen))

        lines = [
            f"{lora}: {file.describe()}, strength {strength:g}" + (" (off)" if strength == 0 else ""),
            f"keys: {file.form}; alpha: {file.alpha_from}",
            *file.notes,
            *remarks,
            f"{len(grid) - 1} steps, shifts {video:g}/{audio:g}, {chosen.sampler}",
            f"sigmas: {sigmas.describe(grid)}",
            *lines,
            *([f"warning: {warning}"] if warning else []),
        ]
        info = "\n".join(lines)
        log.info("H3 Turbo LoRA\n%s", info)
        return io.NodeOutput(patched, grid, sampler.make_sampler(chosen.sampler), info, ui=host.shown(cls, info))


def _fit(model, file, adaln_source):
    """({layer: Adapter} for this model, remarks for the info)."""
    diffusion = model.model.diffusion_model
    weights = {name: getattr(module, "weight", None) for name, module in diffusion.named_modules()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if weight is not None and weight.dim() == 2}
    table = diffusion.adaln_t_table.detach().cpu() if diffusion.use_adaln_curves else None
    match = turbo.match(file, shapes, None if table is None else table.shape[1])
    remarks = []
    if match.full_adaln:
        fitted, text = _adaln(match.full_adaln, table, adaln_source)
        match.adapters.update(fitted)
        remarks.append(text)
    missed = [*match.absent, *(f"{layer} ({why})" for layer, why in match.unfit.items())]
    if missed or file.unused:
        counts = f"{len(match.adapters)} of {len(file.adapters)} modules applied"
        text = f"warning: {counts}; not in this model: {_few(missed)}; keys of nothing: {_few(file.unused)}"
        log.warning("H3 Turbo LoRA: %s", text)
        remarks.append(text)
    return match.adapters, remarks


def _few(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"


def _adaln(pairs, table, source):
    """AdaLN pairs of the full width for a pruned model: fitted to its curve, or left out with the reason."""
    if source == NONE:
        text = (
            f"warning: {len(pairs)} AdaLN pairs left out: this model is pruned and holds no time embedder to express them with. Choose the "
            "full checkpoint in 'adaln_source'"
        )
        log.warning("H3 Turbo LoRA: %s", text)
        return {}, text
    with safe_open(folder_paths.get_full_path_or_raise("diffusion_models", source), "pt") as full:
        curve = adaln.time_curve(full.get_tensor, list(full.keys()), table.shape[0])
    distance = adaln.check_table(curve, table)
    fits = {layer: adaln.fit(pair, curve, table) for layer, pair in pairs.items()}
    worst = max(fit.residual for fit in fits.values())
    text = f"{len(pairs)} AdaLN pairs expressed in the model's time curve: residual at most {worst:.1e} (the curve itself: {distance:.1e})"
    return {layer: turbo.in_curve_basis(pair, fits[layer]) for layer, pair in pairs.items()}, text


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _watch_schedule(preset):
    """A wrapper that says when the model is sampled with a base model's schedule after all."""

    def run(executor, noise, latent_image, chosen, grid, *args, **kwargs):
        warning = presets.schedule_warning(preset, len(grid) - 1)
        if warning:
            log.warning("H3 Turbo LoRA: %s", warning)
        return executor(noise, latent_image, chosen, grid, *args, **kwargs)

    return run

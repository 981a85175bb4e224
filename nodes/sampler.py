"""H3 Sampler: samplers that know H3's two clocks, and their sigmas."""

import logging

import comfy.model_base
import comfy.samplers
import torch
from comfy.k_diffusion.sampling import default_noise_sampler
from comfy_api.latest import io
from comfy_extras.nodes_minimax_h3 import MiniMaxH3SigmaShift
from tqdm.auto import tqdm

from ..h3 import samplers, sigmas
from . import checks, host

log = logging.getLogger("h3_vortex")
NODE = "H3 Sampler"
SCHEDULES = ("turbo", "simple", "beta")


def make_sampler(name, eta=0.0):
    """A SAMPLER for any guider: one of :data:`..h3.samplers.NAMES`."""
    return comfy.samplers.KSAMPLER(_turbo_euler if name == "turbo_euler" else _one_clock, extra_options={"name": name, "eta": eta})


def shifts_of(model):
    """(video, sound) flow shifts that the H3 model of a ModelPatcher samples with."""
    return _shifts(model.model_options.get("transformer_options", {}), model.model.diffusion_model)


def _shifts(options, diffusion_model):
    # the keys and the defaults of comfy.ldm.minimax.model.MiniMaxH3Model.forward
    return (
        float(options.get("minimax_h3_sigma_shift_video", diffusion_model.sigma_shift_video)),
        float(options.get("minimax_h3_sigma_shift_audio", diffusion_model.sigma_shift_audio)),
    )


def set_shifts(model, shift_video, shift_audio):
    """A clone with these shifts, made by core's ModelSamplingMiniMaxH3; the very model when it has them already."""
    if shifts_of(model) == (shift_video, shift_audio):
        return model
    return MiniMaxH3SigmaShift.execute(model, shift_video, shift_audio).result[0]


def make_sigmas(model, schedule, steps):
    """fp32 ``[steps + 1]`` of a schedule at the model's own video shift."""
    if schedule == "turbo":
        return sigmas.turbo(steps, shifts_of(model)[0])
    return comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), schedule, steps).cpu()


def _run(sample, model, x, sigmas, extra_args, callback, disable, eta, noise_sampler):
    """What the samplers share: the guider behind a plain ``denoise``, noise by seed, progress to ComfyUI and to the console."""
    extra_args = {} if extra_args is None else extra_args
    ones = x.new_ones([x.shape[0]])
    scale = getattr(model.inner_model.inner_model.model_sampling, "noise_scale", 1.0)
    noise_sampler = noise_sampler or default_noise_sampler(x, seed=extra_args.get("seed"))

    with tqdm(total=len(sigmas) - 1, disable=disable) as bar:

        def on_step(index, packed, sigma, denoised):
            if callback is not None:
                callback({"x": packed, "i": index, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
            bar.update(index + 1 - bar.n)

        return sample(
            lambda packed, sigma: model(packed, sigma * ones, **extra_args),
            eta=eta,
            noise=lambda sigma, sigma_next: noise_sampler(sigma, sigma_next) * scale,
            on_step=on_step,
        )


@torch.no_grad()
def _one_clock(model, x, sigmas, extra_args=None, callback=None, disable=None, name="euler", eta=0.0, noise_sampler=None):
    method = samplers.ONE_CLOCK[name]
    return _run(
        lambda denoise, **more: method(denoise, x, sigmas, **more), model, x, sigmas, extra_args, callback, disable, eta, noise_sampler
    )


@torch.no_grad()
def _turbo_euler(model, x, sigmas, extra_args=None, callback=None, disable=None, name="turbo_euler", eta=0.0, noise_sampler=None):
    base = model.inner_model.inner_model
    if not isinstance(base, comfy.model_base.MiniMaxH3):
        raise ValueError(f"turbo_euler steps the two clocks of MiniMax H3, the model is {type(base).__name__}: choose another sampler")
    options = (extra_args or {}).get("model_options", {}).get("transformer_options", {})
    shift_video, shift_audio = _shifts(options, base.diffusion_model)
    shapes = base.latent_shapes or [x.shape]
    if len(shapes) > 1 and abs(base.audio_scale() - shift_video / shift_audio) > 1e-6 * base.audio_scale():
        raise ValueError(
            f"the model carries its sound by {base.audio_scale():g}, its shifts {shift_video:g}/{shift_audio:g} say "
            f"{shift_video / shift_audio:g}: set both with ModelSamplingMiniMaxH3 or H3 Turbo LoRA, after any other sampling node"
        )
    sizes = [torch.Size(shape[1:]).numel() for shape in shapes] if len(shapes) > 1 else [x.shape[-1]]
    parts = samplers.streams(sigmas, sizes, shift_video, shift_audio)
    return _run(
        lambda denoise, **more: samplers.turbo_euler(denoise, x, parts, **more),
        model, x, sigmas, extra_args, callback, disable, eta, noise_sampler,
    )  # fmt: skip


class H3VortexSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexSampler",
            display_name="H3 Sampler",
            category="H3 Vortex",
            description="A sampler and its sigmas for MiniMax H3. turbo_euler steps video and sound each on its own clock, as the "
            "official scheduler does; the others run on the video's clock, as ComfyUI's own samplers do.",
            search_aliases=["minimax", "h3", "sampler", "scheduler", "sigmas", "res_2s", "turbo"],
            inputs=[
                io.Model.Input("model", tooltip="The H3 model: its shifts decide the sigmas."),
                io.Combo.Input(
                    "sampler",
                    options=list(samplers.NAMES),
                    default="res_multistep",
                    tooltip="turbo_euler: two clocks, for Turbo LoRAs. euler, res_multistep: the bytes of ComfyUI's. res_2s: two model "
                    "calls a step.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(SCHEDULES),
                    default="simple",
                    tooltip="turbo: the official grid at any number of steps. simple and beta: ComfyUI's.",
                ),
                io.Int.Input("steps", default=20, min=1, max=200, tooltip="Steps; res_2s makes two model calls in each but the last."),
                io.Float.Input(
                    "shift_video",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Flow shift of the video, 12 for the base model. 0: as the model comes in.",
                ),
                io.Float.Input(
                    "shift_audio",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Flow shift of the sound, 3 for the base model. 0: as the model comes in.",
                ),
                io.Float.Input(
                    "eta",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    advanced=True,
                    tooltip="Fresh noise in every step, scaled for video and sound each. 0: none, the same result for the same seed on "
                    "any sampler.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Sampler.Output(display_name="sampler", tooltip="For H3 Packed Denoiser or SamplerCustomAdvanced."),
                io.Sigmas.Output(display_name="sigmas", tooltip="As many steps as it has sigmas, less one."),
                io.Model.Output(display_name="model", tooltip="The model with the shifts set here, or the very one that came in."),
                io.String.Output(display_name="info", tooltip="Sampler, shifts and sigmas in words."),
            ],
        )

    @classmethod
    def execute(cls, model, sampler, schedule, steps, shift_video, shift_audio, eta):
        checks.h3_model(NODE, "model", model)
        present = shifts_of(model)
        model = set_shifts(model, shift_video or present[0], shift_audio or present[1])
        grid = make_sigmas(model, schedule, steps)
        video, audio = shifts_of(model)
        info = f"{sampler}, {schedule}, {steps} steps, shifts {video:g}/{audio:g}, eta {eta:g}\nsigmas: {sigmas.describe(grid)}"
        log.info("H3 Sampler: %s", info.replace("\n", "; "))
        return io.NodeOutput(make_sampler(sampler, eta), grid, model, info, ui=host.shown(cls, info))

"""H3 Packed Denoiser: core's sampling with a record of the run, and a stop when the numbers go wrong."""

import json
import logging

import comfy.model_management
import comfy.utils
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io, ui
from comfy_extras.nodes_custom_sampler import BasicGuider, RandomNoise, SamplerCustomAdvanced

from ..h3 import grid, record
from . import checks, host

log = logging.getLogger("h3_vortex")

NODE = "H3 Packed Denoiser"
WRAPPER_KEY = "h3_vortex_run_record"


class H3VortexDenoise(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexDenoise",
            display_name="H3 Packed Denoiser",
            category="H3 Vortex",
            description="Sample video and sound together. The latents are those of core's SamplerCustomAdvanced with a basic "
            "guider, byte for byte; besides, it gives a record of the run.",
            search_aliases=["minimax", "h3", "sampler", "ksampler", "sample"],
            inputs=[
                io.Model.Input("model", tooltip="The H3 diffusion model, with LoRAs, shifts or H3 Accelerate in front as wanted."),
                io.Conditioning.Input("positive", tooltip="The conditioning of H3 Conditioning or of core's H3 nodes."),
                io.Latent.Input("latent", tooltip="The H3 latent to start from: one clip, video and sound."),
                io.Sampler.Input("sampler", tooltip="For example KSamplerSelect."),
                io.Sigmas.Input("sigmas", tooltip="For example BasicScheduler: as many steps as it has sigmas, less one."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Seed of the noise; not used when 'noise' is connected.",
                ),
                io.Noise.Input("noise", optional=True, tooltip="For example RandomNoise: takes the place of 'seed'."),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The finished latent, for H3 Decode."),
                io.String.Output(
                    display_name="record",
                    tooltip="JSON: time of every step, peak memory, SHA-256 of the video and the sound latent, device, versions.",
                ),
            ],
        )

    @classmethod
    def execute(cls, model, positive, latent, sampler, sigmas, seed, noise=None):
        checks.h3_model(NODE, "model", model)
        checks.connected(NODE, "positive", positive, "the conditioning of H3 Conditioning")
        video, audio = checks.h3_latent(NODE, "latent", latent)
        checks.batch_of_one(NODE, "latent", video)
        if len(sigmas) < 2:
            raise ValueError(f"{NODE}: 'sigmas' has {len(sigmas)} value(s), so there is no step to make: connect a scheduler")
        try:
            grid.frames_for_latent(video.shape[2])
        except grid.GridError as error:
            log.warning("H3 Packed Denoiser: %s; H3 was not trained on such a length", error)

        clock = record.StepClock(model.load_device, comfy.model_management.synchronize)
        timed = model.clone()
        timed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, _watch(clock, [video.shape, audio.shape]))
        (guider,) = BasicGuider.execute(model=timed, conditioning=positive).result
        if noise is None:
            (noise,) = RandomNoise.execute(noise_seed=seed).result
        finished = SamplerCustomAdvanced.execute(noise=noise, guider=guider, sampler=sampler, sigmas=sigmas, latent_image=latent).result[0]

        video, audio = checks.h3_latent(NODE, "latent", finished)
        text = json.dumps(
            clock.record(
                video,
                audio,
                seed=noise.seed,
                sigmas=[round(float(sigma), 6) for sigma in sigmas],
                versions={"comfyui": host.version()},
            )
        )
        log.info("H3 Packed Denoiser: %s", text)
        host.show(host.node_id(cls), _glance(json.loads(text)))
        return io.NodeOutput(finished, text, ui=ui.PreviewText(text))


def _glance(run):
    """The run record in three lines, for the node on the canvas."""
    steady = run["step_ms"][1:] or run["step_ms"]
    peak = f", peak {run['peak_memory_bytes'] / 2**30:.1f} GiB" if run["peak_memory_bytes"] else ""
    return (
        f"{run['steps']} steps in {run['total_ms'] / 1e3:.1f} s, {sum(steady) / len(steady) / 1e3:.2f} s a step after the first{peak}\n"
        f"video {run['video_sha256'][:16]}\nsound {run['audio_sha256'][:16]}"
    )


def _watch(clock, shapes):
    """A wrapper around the sampler itself: the models are loaded by then, so the first step's time is its own."""

    def run(executor, guider, sigmas, extra_args, callback, *more, **named):
        def after_step(step, x0, x, total_steps):
            clock.tick()
            if len(clock.step_ms) == 1:
                record.check_finite(dict(zip(("video", "sound"), comfy.utils.unpack_latents(x0, shapes), strict=True)), 1)
            return callback(step, x0, x, total_steps)

        clock.start()
        return executor(guider, sigmas, extra_args, after_step, *more, **named)

    return run

"""H3 Decode: latents to frames, sound and video; the latent stays on disk until that has worked."""

import logging
import secrets
import time
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy.nested_tensor import NestedTensor
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_extras.nodes_audio import VAEDecodeAudio
from comfy_extras.nodes_video import CreateVideo

import nodes

from ..h3 import grid, latent_file, levels, record
from . import checks, host

log = logging.getLogger("h3_vortex")

NODE = "H3 Decode"
NONE = "none"
FOLDER = "h3_vortex_latents"
TILE = {"tile_size": 256, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


class H3VortexDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="H3VortexDecode",
            display_name="H3 Decode",
            category="H3 Vortex",
            description="Frames, sound and a 24 frames a second video from an H3 latent. The latent is written to "
            f"output/{FOLDER} first and removed when everything is decoded, so a failed decode loses nothing. "
            "Of a latent with video alone or sound alone, that is decoded.",
            search_aliases=["minimax", "h3", "vae decode", "decode latent"],
            inputs=[
                io.Vae.Input("vae", tooltip="The video VAE of H3 Load."),
                io.Vae.Input("audio_vae", tooltip="The audio VAE of H3 Load."),
                io.Latent.Input("latent", optional=True, tooltip="The latent of H3 Packed Denoiser."),
                io.Combo.Input(
                    "saved_latent",
                    options=[NONE, *_saved()],
                    default=NONE,
                    optional=True,
                    advanced=True,
                    tooltip=f"Decode a latent that an earlier, failed decode left in output/{FOLDER} (press R to see new ones). "
                    "'latent' is then not used, and the file is kept.",
                ),
                io.Boolean.Input(
                    "free_models",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip="Unload the diffusion model and the text encoder before decoding. Turn off when all of them fit.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Image.Output(display_name="images", tooltip="The frames."),
                io.Audio.Output(display_name="audio", tooltip="The sound, 32 kHz stereo."),
                io.Video.Output(display_name="video", tooltip="Frames and sound at 24 frames a second, for Save Video."),
                io.String.Output(display_name="info", tooltip="Size, length, loudness, and how it was decoded."),
            ],
        )

    @classmethod
    def execute(cls, vae, audio_vae, latent=None, saved_latent=NONE, free_models=True):
        checks.video_vae(NODE, "vae", vae)
        checks.audio_vae(NODE, "audio_vae", audio_vae)
        if saved_latent != NONE:
            path = _chosen(saved_latent)
            latent = {"samples": NestedTensor([stream for stream in latent_file.load(path) if stream is not None])}
            video, audio = _streams("saved_latent", latent)
        else:
            video, audio = _streams("latent", latent)
            path = _keep(video, audio)

        began = time.perf_counter()
        if free_models:
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
        try:
            images, sound, retried = _decode(vae if video is not None else None, audio_vae if audio is not None else None, latent)
        except comfy.model_management.InterruptProcessingException:
            log.warning("H3 Decode: interrupted; %s", _resume(path))
            raise
        except Exception as error:
            raise RuntimeError(f"{NODE}: {type(error).__name__}: {error}. {_resume(path)}") from error
        movie = None
        if images is not None:
            (movie,) = CreateVideo.execute(images=images, fps=float(grid.FRAME_RATE), audio=sound).result
        if saved_latent == NONE and path is not None:
            path.unlink(missing_ok=True)

        info = _describe(images, sound, retried, time.perf_counter() - began)
        return io.NodeOutput(
            _or_blocked(images, "images", "sound"),
            _or_blocked(sound, "audio", "video"),
            _or_blocked(movie, "video", "sound"),
            info,
            ui=host.shown(cls, info),
        )


def _streams(name, latent):
    """The latent's (video, audio); None for what a latent of one stream lacks."""
    samples = checks.connected(NODE, name, latent, "the latent of H3 Packed Denoiser")["samples"]
    tensors = samples.unbind() if isinstance(samples, NestedTensor) else [samples]
    if len(tensors) == 1:
        if grid.is_video(tensors[0].shape):
            return tensors[0], None
        if grid.is_audio(tensors[0].shape):
            return None, tensors[0]
    return checks.h3_latent(NODE, name, latent)


def _or_blocked(value, output, only):
    """``value``, or what stops the nodes connected to that output, with the reason."""
    if value is not None:
        return value
    return ExecutionBlocker(
        f"{NODE}: the latent holds {only} alone, so there is nothing on '{output}': disconnect it, or decode a latent with both"
    )


def _folder():
    return Path(folder_paths.get_output_directory()) / FOLDER


def _saved():
    return sorted(path.name for path in _folder().glob("*.safetensors"))


def _chosen(name):
    """The file behind a choice of 'saved_latent'. A link or a script can give any text, and a file there may be a link to elsewhere."""
    if name not in _saved() or (_folder() / name).resolve().parent != _folder().resolve():
        raise ValueError(f"{NODE}: 'saved_latent' {name!r} is not a file of output/{FOLDER}: choose one of its list, or {NONE!r}")
    return _folder() / name


def _keep(video, audio):
    """Write the latent; without a writable disk the decode goes on, with a warning."""
    digest = record.sha256(video if video is not None else audio)[:8]
    path = _folder() / f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}-{secrets.token_hex(3)}.safetensors"
    try:
        latent_file.save(path, video, audio)
    except OSError as error:
        log.warning("H3 Decode: the latent could not be saved before decoding (%s)", error)
        return None
    return path


def _resume(path):
    if path is None:
        return "The latent could not be saved"
    return f"The latent is safe in {path}: choose {path.name} as 'saved_latent' of H3 Decode to decode it again"


def _decode(vae, audio_vae, latent):
    """Frames, sound, and which of them needed a second try. Without a VAE its part is None."""

    def frames():
        return nodes.VAEDecode().decode(vae, latent)[0]

    def frames_in_tiles():
        return nodes.VAEDecodeTiled().decode(vae, latent, **TILE)[0]

    def sound():
        return VAEDecodeAudio.execute(vae=audio_vae, samples=latent).result[0]

    images, again = _with_second_try(frames, frames_in_tiles) if vae is not None else (None, False)
    audio, audio_again = _with_second_try(sound, sound) if audio_vae is not None else (None, False)
    retried = [name for name, second in (("video", again), ("sound", audio_again)) if second]
    return images, audio, retried


def _with_second_try(first, second):
    """``first()``; when memory ran out, everything else is unloaded and ``second()`` is tried. (result, tried twice)"""
    try:
        return first(), False
    except Exception as error:
        comfy.model_management.raise_non_oom(error)
    # outside the except block: the exception would keep the failed attempt's tensors alive
    log.warning("H3 Decode: out of memory; unloading every model and decoding again in tiles")
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache(True)
    return second(), True


def _describe(images, sound, retried, seconds):
    parts, faults, video_s, audio_s = [], [], None, None
    if images is not None:
        frames, height, width = images.shape[:3]
        video_s = grid.seconds_for_frames(frames)
        parts.append(f"{width} x {height}, {frames} frames = {video_s:.3f} s")
    if sound is not None:
        rate, wave = sound["sample_rate"], sound["waveform"]
        audio_s, level = wave.shape[-1] / rate, levels.measure(wave)
        parts.append(f"sound {audio_s:.3f} s at {rate} Hz ({level})")
        faults += level.faults()
    if video_s is None or audio_s is None:
        parts.append("no sound in the latent" if audio_s is None else "no video in the latent")
    elif abs(video_s - audio_s) >= 1 / grid.AUDIO_LATENT_RATE:
        faults.append(f"video and sound differ by {abs(video_s - audio_s):.3f} s")
    info = f"{', '.join(parts)}; decoded in {seconds:.1f} s"
    if retried:
        info += f"; {' and '.join(retried)} after running out of memory once"
    if faults:
        info += "; check: " + "; ".join(faults)
        log.warning("H3 Decode: %s", info)
    else:
        log.info("H3 Decode: %s", info)
    return info

"""MiniMax H3 without ComfyUI: diffusers' own modular pipeline, with this pack's kernels in its transformer.

diffusers supplies the model, the VAEs, the schedulers, the packing of the sequence and the parallelism; transformers the text encoder. What
is added here: the kernels, the choice of attention, Turbo LoRA presets, the run record, and the file. :func:`open_engine` loads a model
directory, or makes a tiny random one on the spot.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from . import grid, presets, record, sigmas

IMAGES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
VIDEOS = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi"})
SOUNDS = frozenset({".wav", ".mp3", ".flac", ".ogg", ".m4a", ".aac", ".opus"})
MIN_FRAMES = 22  # one whole clip of the VAE's besides the frames it carries over


class RequestError(ValueError):
    """A request that H3 cannot make, or a file that is no use; the message says which value and what would do."""


@dataclass(frozen=True)
class Request:
    """One clip. ``seconds`` become the nearest 17 k + 5 frames at 24 a second; ``steps`` are model calls (None: the Turbo file's, else 24).

    ``first_frame``, ``last_frame``: picture files. ``references``: picture, video and sound files, in the order the model reads them; not
    together with keyframes, for they run on another partition of the checkpoint.
    """

    prompt: str
    width: int = 1344
    height: int = 768
    seconds: float = 5.0
    steps: int | None = None
    seed: int = 0
    first_frame: Path | None = None
    last_frame: Path | None = None
    references: tuple[Path, ...] = ()

    def check(self):
        """Raises :class:`.grid.GridError` or :class:`RequestError`."""
        grid.check_size("width", self.width)
        grid.check_size("height", self.height)
        if grid.frames_for_seconds(self.seconds) < MIN_FRAMES:
            raise RequestError(f"{self.seconds:g} seconds are too short: diffusers' video VAE makes {MIN_FRAMES} frames or more; use 0.6")
        if self.references and (self.first_frame or self.last_frame):
            raise RequestError("keyframes and references are tasks of two transformers: give --first-frame, --last-frame or --reference")
        if self.steps is not None and self.steps < 1:
            raise RequestError(f"steps is {self.steps}: there must be at least 1")
        for path in (self.first_frame, self.last_frame, *self.references):
            if path is not None and not Path(path).is_file():
                raise RequestError(f"{path} is not there")


@dataclass(frozen=True)
class Clip:
    """``frames`` uint8 ``[F, H, W, 3]``; ``sound`` fp32 ``[2, n]`` at ``rate`` Hz; ``record``: the run record, JSON-ready."""

    frames: torch.Tensor
    sound: torch.Tensor
    rate: int
    record: dict


class Engine:
    """A loaded pipeline. Make it with :func:`open_engine`.

    Args:
        pipeline: diffusers ``MiniMaxH3ModularPipeline`` with its components.
        device: where it computes.
        name: for the record.
        turbo: ``(preset, how it was found)`` of the LoRA that was loaded, or None.
    """

    DEFAULT_STEPS = 24

    def __init__(self, pipeline, device, name, turbo=None):
        self.pipeline, self.device, self.name, self.turbo = pipeline, torch.device(device), name, turbo

    def transformer(self, references=False):
        found = getattr(self.pipeline, "transformer_ref" if references else "transformer", None)
        if found is None:
            raise RequestError(f"{self.name} was opened {'without' if references else 'for'} references; open it the other way")
        return found

    def generate(self, request: Request, accelerated=True, features=None, attention=None) -> Clip:
        """Make one clip.

        Args:
            accelerated: False runs diffusers as it is.
            features, attention: see :func:`..kernels.patch.diffusers.accelerate`; None: its defaults.

        Raises:
            RequestError, GridError: see :meth:`Request.check`. NotFinite: the latents hold NaN or infinity. ValueError: what diffusers
            refuses.
        """
        from ..kernels.patch import diffusers as host

        request.check()
        transformer = self.transformer(bool(request.references))
        steps = request.steps or (self.turbo[0].steps if self.turbo else self.DEFAULT_STEPS)
        arguments = self._arguments(request, steps)
        clock = record.StepClock(self.device, torch.cuda.synchronize if self.device.type == "cuda" else lambda: None)
        with contextlib.ExitStack() as stack:
            handle = None
            if accelerated:
                handle = stack.enter_context(host.accelerate(transformer, features, **({"attention": attention} if attention else {})))
                stack.enter_context(handle.run())
            for hook in _clock_hooks(transformer, clock):
                stack.callback(hook.remove)
            with self._schedule(steps):
                state = self.pipeline(**arguments)
        video, audio = state.get("latents"), state.get("audio_latents")
        record.check_finite({"video": video, "audio": audio}, steps)
        frames = torch.from_numpy(state.get("videos")[0]).mul(255).round().to(torch.uint8)
        report = handle.report() if handle is not None else None
        job = {**{key: value for key, value in asdict(request).items() if value not in (None, ())}, "steps": steps, "frames": len(frames)}
        job |= {key: str(job[key]) for key in ("first_frame", "last_frame") if key in job}
        job |= {"references": [str(path) for path in request.references]} if request.references else {}
        return Clip(frames, state.get("audio")[0].float().cpu(), int(state.get("sampling_rate")), clock.record(
            video, audio, engine="diffusers", model=self.name, request=job, kernels=report,
            turbo={"preset": self.turbo[0].describe(), "found": self.turbo[1]} if self.turbo else None,
            versions={name: importlib.metadata.version(name) for name in ("diffusers", "transformers")}))

    def _arguments(self, request, steps) -> dict:
        frames = grid.frames_for_seconds(request.seconds)
        arguments = {
            "prompt": request.prompt, "width": request.width, "height": request.height, "num_frames": frames,
            "num_inference_steps": steps + 1,  # diffusers counts points of the schedule, its end included
            "generator": torch.Generator("cpu").manual_seed(request.seed), "output_type": "np",
        }
        for name, path in (("image", request.first_frame), ("last_image", request.last_frame)):
            if path is not None:
                arguments[name] = _open_image(path)
        if request.references:
            arguments["references"] = [_reference(path) for path in request.references]
        return arguments

    @contextlib.contextmanager
    def _schedule(self, steps):
        """The Turbo preset's flow shifts, and its own grid where it has one, for one run; the schedulers are put back."""
        if self.turbo is None:
            yield
            return
        preset, own = self.turbo[0], (self.pipeline.scheduler, self.pipeline.audio_scheduler)
        before = [scheduler.shift for scheduler in own]
        shifts = preset.shift_video, preset.shift_audio
        for scheduler, shift in zip(own, shifts, strict=True):
            scheduler.set_shift(shift)
        if preset.grid and steps == preset.steps:
            video = preset.sigmas(steps)
            audio = torch.cat([sigmas.change_shift(video[:-1], *shifts), torch.zeros(1, dtype=torch.float64)]).float()
            for scheduler, points in zip(own, (video, audio), strict=True):
                scheduler.set_timesteps = _fixed_grid(scheduler, points)
        try:
            yield
        finally:
            for scheduler, shift in zip(own, before, strict=True):
                scheduler.set_shift(shift)
                vars(scheduler).pop("set_timesteps", None)


def _fixed_grid(scheduler, points):
    return lambda num_inference_steps=None, device=None: type(scheduler).set_timesteps(scheduler, device=device, sigmas=points)


def _clock_hooks(transformer, clock):
    """Hooks that start ``clock`` with the first model call and tick it after every one."""
    def before(module, args):
        if not clock.step_ms:
            clock.start()

    return transformer.register_forward_pre_hook(before), transformer.register_forward_hook(lambda *_: clock.tick())


def _open_image(path):
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise RequestError(f"{path} is no picture that Pillow can read") from None


def _reference(path):
    from diffusers.modular_pipelines.minimax_h3 import references

    suffix = Path(path).suffix.lower()
    for kinds, name in ((IMAGES, "Image"), (VIDEOS, "Video"), (SOUNDS, "Audio")):
        if suffix in kinds:
            return getattr(references, f"MiniMaxH3{name}Reference").from_file(str(path))
    raise RequestError(f"reference {path}: {suffix or 'no ending'} is no known kind; pictures {sorted(IMAGES)}, videos {sorted(VIDEOS)}, "
                       f"sounds {sorted(SOUNDS)}")


# -- opening -----------------------------------------------------------------------------------------------------------------------


def open_engine(
    model=None, references=False, device=None, dtype=torch.bfloat16, turbo=None, offload=False, parallel=False, seed=0
) -> Engine:
    """Load a model directory in diffusers' format, or make a tiny random model.

    Args:
        model: directory with ``modular_model_index.json``; None: :mod:`.embedded_tiny`.
        references: load the partition for references instead of the one for text and keyframes.
        device: default CUDA where there is one.
        dtype: of the transformer and the text encoder.
        turbo: LoRA file, in any of the forms that diffusers converts; its preset is found by name or content (:mod:`.presets`).
        offload: keep components on the CPU and move each to ``device`` while it works.
        parallel: split the sequence over the ranks of the process group that is already there (diffusers' context parallelism, Ulysses).
        seed: of the tiny model's weights.

    Raises:
        RequestError: ``model`` or ``turbo`` is not there. What diffusers and safetensors raise for damaged files.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    manager = None
    if offload:
        from diffusers import ComponentsManager

        manager = ComponentsManager()
        manager.enable_auto_cpu_offload(device=device)
    if model is None:
        from . import embedded_tiny

        pipeline = embedded_tiny.pipeline(references, dtype, seed, manager)
        name = f"tiny random model, seed {seed}"
    else:
        pipeline = _load(Path(model), references, dtype, manager)
        name = Path(model).name
    engine = Engine(pipeline, device, name)
    if turbo is not None:
        engine.turbo = load_turbo(pipeline, Path(turbo), references)
    if not offload:
        pipeline.to(device)
    if parallel:
        enable_parallelism(engine.transformer(references), device)
    return engine


def enable_parallelism(transformer, device) -> None:
    """diffusers' Ulysses over all ranks of the process group.

    On GPUs the number of ranks has to divide nothing. On a CPU (tests) it must divide the packed length: gloo gathers equal parts only.
    """
    from diffusers import ContextParallelConfig

    # diffusers takes the rank modulo the number of accelerators; without any, every rank is on the one CPU
    counted = contextlib.nullcontext() if device.type != "cpu" else mock.patch("torch.accelerator.device_count", return_value=1)
    with counted:
        transformer.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=torch.distributed.get_world_size(), ulysses_anything=device.type != "cpu"))


def _load(folder, references, dtype, manager):
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline

    if not (folder / "modular_model_index.json").is_file():
        raise RequestError(f"{folder} holds no modular_model_index.json: give a MiniMax H3 directory in diffusers' format")
    pipeline = MiniMaxH3ModularPipeline.from_pretrained(str(folder), components_manager=manager)
    # the classes keep what the checkpoint has in fp32; text alone and keyframes take the same components
    pipeline.load_components(workflow="ref2va" if references else "fl2va", dtype=dtype)
    return pipeline


def load_turbo(pipeline, path: Path, references=False):
    """Load a Turbo LoRA beside the weights; returns ``(preset, how it was found)``.

    Raises:
        RequestError: the file is not there.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise RequestError(f"turbo file {path} is not there")
    preset, found = presets.choose(path.name, lambda: _file_sha256(path))
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata() or {}, list(file.keys())
        tensors = None
        if preset.alpha is not None and "alpha" not in metadata and not any(name.endswith(".alpha") for name in names):
            tensors = {name: file.get_tensor(name) for name in names}
    if tensors is not None:  # the file states no alpha and diffusers would take the rank for it
        for name, tensor in tensors.items():
            if "lora_B" in name or "lora_up" in name or "lora.up" in name:
                tensors[name] = tensor * (preset.alpha / tensor.shape[1])
    pipeline.load_lora_weights(tensors or str(path), adapter_name="turbo", load_into_transformer_ref=references)
    return preset, found


def _file_sha256(path):
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- the file ------------------------------------------------------------------------------------------------------------------------


def write_mp4(path, clip: Clip, rate=grid.FRAME_RATE) -> None:
    """H.264 (yuv420p, CRF 18) and AAC stereo, as MP4."""
    import av

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames, height, width, _ = clip.frames.shape
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as file:
        video = file.add_stream("h264", rate=rate, options={"crf": "18"})
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio = file.add_stream("aac", rate=clip.rate, layout="stereo")
        for frame in clip.frames:
            file.mux(video.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")))
        file.mux(video.encode(None))
        sound = av.AudioFrame.from_ndarray(clip.sound.clamp(-1, 1).contiguous().numpy(), format="fltp", layout="stereo")
        sound.sample_rate = clip.rate
        file.mux(audio.encode(sound))
        file.mux(audio.encode(None))


def equal(one: Clip, other: Clip) -> bool:
    """Whether two clips hold the same bytes: latents, frames and sound."""
    hashes = all(one.record[key] == other.record[key] for key in ("video_sha256", "audio_sha256"))
    return hashes and torch.equal(one.frames, other.frames) and torch.equal(one.sound.view(torch.int32), other.sound.view(torch.int32))

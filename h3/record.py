"""The record of one sampling run: time of every step, peak memory, and the SHA-256 of what came out."""

from __future__ import annotations

import hashlib
import platform
import time

import torch

from . import VERSION


class NotFinite(ValueError):
    """The latents hold NaN or infinity."""


def sha256(tensor):
    """SHA-256, in hex, of a tensor's values in memory order of its contiguous CPU copy."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(data.numpy())).hexdigest()


def check_finite(streams, step):
    """Raise :class:`NotFinite` when a tensor of ``{name: tensor}`` has a value that is not finite.

    One reduction per stream and one wait for the device: meant for once per run.
    """
    for name, tensor in streams.items():
        bad = int(tensor.numel() - torch.isfinite(tensor).sum())
        if bad:
            raise NotFinite(
                f"after step {step} the {name} latent has {bad} of {tensor.numel()} values that are NaN or infinite, so "
                "the run was stopped. Nearly always a damaged or mismatched file: check the checkpoint and the LoRAs "
                "(a LoRA made for the other form of the model, too high a strength), then the attention backend"
            )


class StepClock:
    """Times the steps of one run. Call :meth:`start` when the model is ready and :meth:`tick` after every step.

    Args:
        device: where the model computes.
        synchronize: waits for that device, so that a step's time holds its work and not only its launches.
    """

    def __init__(self, device, synchronize):
        self.device = torch.device(device)
        self.synchronize = synchronize
        self.step_ms = []
        self._begin = self._last = time.perf_counter()
        self._setup_ms = 0.0

    def start(self):
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._last = time.perf_counter()
        self._setup_ms = (self._last - self._begin) * 1e3

    def tick(self):
        self.synchronize()
        now = time.perf_counter()
        self.step_ms.append((now - self._last) * 1e3)
        self._last = now

    def record(self, video, audio, **more):
        """The run record as a dict that JSON can hold.

        ``step_ms``: from the end of a step to the end of the next; ``setup_ms``: before the first step, loading included.
        ``peak_memory_bytes``: torch's peak on a CUDA device since the first step began, None elsewhere.
        """
        self.synchronize()
        cuda = self.device.type == "cuda"
        return {
            "steps": len(self.step_ms),
            "setup_ms": round(self._setup_ms, 3),
            "step_ms": [round(ms, 3) for ms in self.step_ms],
            "total_ms": round((time.perf_counter() - self._begin) * 1e3, 3),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "video_sha256": sha256(video),
            "audio_sha256": sha256(audio),
            "video_shape": list(video.shape),
            "audio_shape": list(audio.shape),
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device) if cuda else platform.processor() or platform.machine(),
            "versions": {"h3_vortex": VERSION, "torch": torch.__version__, **more.pop("versions", {})},
            **more,
        }

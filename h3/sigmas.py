"""Sigma grids of MiniMax H3: one per stream, each with its own flow shift, and how ComfyUI carries the sound on the video's.

A stream's sigma falls from 1 (noise) to 0 (clean). All streams share one uniform grid ``q`` from 1 to 0; a stream with flow
shift ``s`` is at ``sigma = s q / (1 + (s - 1) q)`` (the rule of MiniMax's own scheduler; diffusers' ``MiniMaxH3Scheduler``).

ComfyUI samples one packed latent on the video's grid. It carries the sound as ``y = (sigma_v / sigma_a) x_a``, which is a flow
latent on the video's grid whose clean value is ``(shift_v / shift_a) x_a`` (``comfy.model_sampling.ModelSamplingAV``).
"""

from __future__ import annotations

import torch


def check_shift(name, shift):
    """Raise ValueError unless ``shift`` is a positive number."""
    if not shift > 0:
        raise ValueError(f"{name} is {shift}: a flow shift is a positive number, 12 for video and 3 for sound where nothing else is said")


def turbo(steps, shift):
    """The official grid: fp32 ``[steps + 1]`` from 1 to 0, ``steps`` model calls.

    Same arithmetic as the official scheduler, which counts grid points: its N are ``steps + 1`` here.

    Raises:
        ValueError: ``steps`` below 1, or ``shift`` not positive or beyond fp32.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}: there must be at least 1")
    check_shift("shift", shift)
    base = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float32)
    grid = shift * base / (1 + (shift - 1) * base)
    if not bool(torch.isfinite(grid).all()) or abs(float(grid[0]) - 1) > 1e-5:  # 1 - (1 - shift) loses a tiny shift's digits
        raise ValueError(f"shift is {shift}: beyond what the grid's fp32 can hold; use 0.01 to 100, 12 for video and 3 for sound")
    return grid


def change_shift(sigma, from_shift, to_shift):
    """Where a stream of ``to_shift`` is when one of ``from_shift`` is at ``sigma`` (tensor or float), in float64 for tensors."""
    if isinstance(sigma, torch.Tensor):
        sigma = sigma.double()
    base = sigma / (from_shift + sigma * (1.0 - from_shift))
    return to_shift * base / (1.0 + (to_shift - 1.0) * base)


def carry(sigma_video, sigma_audio, shift_video, shift_audio):
    """``sigma_v / sigma_a`` of a grid (float64 tensors), with its limit ``shift_v / shift_a`` where both are 0."""
    limit = torch.full_like(sigma_audio, shift_video / shift_audio)
    return torch.where(sigma_audio > 0, sigma_video / sigma_audio.clamp(min=torch.finfo(torch.float64).tiny), limit)


def describe(sigmas):
    """A grid in words: ``1, 0.9730, 0.9231, 0.8000, 0``."""
    return ", ".join(f"{value:.4f}" if value % 1 else f"{value:g}" for value in sigmas.tolist())

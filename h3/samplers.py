"""Samplers for MiniMax H3 in plain torch: Euler on two native clocks, and Euler, RES multistep and RES 2S on the video's clock.

Every sampler takes the packed latent ``x`` ``[1, 1, N]`` as ComfyUI packs it (video first, then sound carried on the video's
schedule, see :mod:`.sigmas`), the video's sigmas, and ``denoise(x, sigma) -> clean estimate of the pack``. None of them writes
into ``x`` or into what ``denoise`` returned.

The carry is linear in the video's sigma, so an Euler step on the carried sound is the native Euler step: ``turbo_euler`` and ``euler``
differ by roundings alone. The RES methods are not of that kind: on the video's clock they weigh the sound's history by the video's
``log sigma``, as ComfyUI's own do.

With ``eta`` 0 (the default everywhere) sampling is deterministic. Above 0, a step goes down to a smaller sigma and noise brings it
back up: with the coefficients of a flow latent (signal ``1 - sigma``, noise ``sigma``), so that the level after the step is
the grid's, for each stream its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import sigmas as grids


@dataclass(frozen=True)
class Stream:
    """One stream of the pack: positions ``[start, stop)`` of the last axis, and where it is at every point of the grid.

    ``sigmas`` (fp32 ``[steps + 1]``) is its own grid; the pack holds ``carry[i]`` times its native value at point ``i``, and ``scale``
    times its clean value.
    """

    start: int
    stop: int
    sigmas: torch.Tensor
    carry: torch.Tensor
    scale: float


def streams(sigmas, sizes, shift_video, shift_audio):
    """The streams of a pack whose parts have ``sizes`` elements: the first is video, a second is sound.

    Args:
        sigmas: fp32 ``[steps + 1]``, the video's grid.
        sizes: elements of each part: ``[video]`` or ``[video, sound]``.
        shift_video, shift_audio: flow shifts of the two.

    Raises:
        ValueError: more than two parts, or a shift that is not positive.
    """
    grids.check_shift("shift_video", shift_video)
    grids.check_shift("shift_audio", shift_audio)
    if len(sizes) not in (1, 2):
        raise ValueError(f"the latent has {len(sizes)} parts: MiniMax H3 has video, or video and sound")
    found = [Stream(0, sizes[0], sigmas, torch.ones_like(sigmas), 1.0)]
    if len(sizes) == 2:
        audio = grids.change_shift(sigmas, shift_video, shift_audio)
        carry = grids.carry(sigmas.double(), audio, shift_video, shift_audio)
        found.append(Stream(sizes[0], sizes[0] + sizes[1], audio.to(sigmas), carry.to(sigmas), shift_video / shift_audio))
    return found


def down_step(sigma, sigma_next, eta):
    """(sigma to step down to, factor on the result, factor on the noise) of a step with noise in a flow latent.

    The smaller sigma is ``sigma_next (1 + eta (sigma_next / sigma - 1))``; scaling by ``(1 - sigma_next) / (1 - sigma_down)`` puts the
    signal where the grid wants it, and the noise factor fills the variance up to ``sigma_next ** 2``.
    """
    if eta == 0 or sigma_next == 0:
        return sigma_next, None, None
    down = sigma_next * (1 + eta * (sigma_next / sigma - 1))
    factor = (1 - sigma_next) / (1 - down)
    return down, factor, (sigma_next**2 - (down * factor) ** 2).clamp(min=0) ** 0.5


def _noised(x, factor, amount, noise):
    return x if factor is None else x * factor + noise * amount


def turbo_euler(denoise, x, parts, eta=0.0, noise=None, on_step=None):
    """Euler toward the clean estimate, for each stream in its own native state and on its own grid.

    ``x_next = r x + (1 - r) x0`` with ``r = sigma_next / sigma``, as the official scheduler steps. The sound's native state is kept
    between steps; the pack that the model sees is made from it.

    Args:
        denoise: ``denoise(pack, video sigma [])`` -> clean estimate of the pack.
        x: ``[1, 1, N]``, the pack at the first grid point.
        parts: of :func:`streams`.
        noise: ``noise(sigma, sigma_next)`` -> standard normal pack; needed when ``eta`` is above 0.
        on_step: ``on_step(index, pack, sigma, clean estimate)``.

    Returns:
        The pack at the last grid point.
    """
    video = parts[0].sigmas
    states = [x[..., part.start : part.stop] / part.carry[0] for part in parts]
    for i in range(len(video) - 1):
        denoised = denoise(x, video[i])
        if on_step is not None:
            on_step(i, x, video[i], denoised)
        fresh = noise(video[i], video[i + 1]) if eta > 0 and video[i + 1] > 0 else None
        pieces = []
        for index, part in enumerate(parts):
            sigma, sigma_next = part.sigmas[i], part.sigmas[i + 1]
            down, factor, amount = down_step(sigma, sigma_next, eta)
            ratio = down / sigma
            clean = denoised[..., part.start : part.stop] / part.scale
            state = ratio * states[index] + (1.0 - ratio) * clean
            if factor is not None:
                state = _noised(state, factor, amount, fresh[..., part.start : part.stop])
            states[index] = state
            pieces.append(state * part.carry[i + 1])
        x = torch.cat(pieces, dim=-1)
    return x


def euler(denoise, x, sigmas, eta=0.0, noise=None, on_step=None):
    """Euler on one clock. With ``eta`` 0 the bytes of ComfyUI's ``euler``: same operations, same order."""
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        if on_step is not None:
            on_step(i, x, sigmas[i], denoised)
        down, factor, amount = down_step(sigmas[i], sigmas[i + 1], eta)
        x = x + (x - denoised) / sigmas[i] * (down - sigmas[i])
        if factor is not None:
            x = _noised(x, factor, amount, noise(sigmas[i], sigmas[i + 1]))
    return x


def _phi1(t):
    return torch.expm1(t) / t


def _phi2(t):
    return (_phi1(t) - 1.0) / t


def res_multistep(denoise, x, sigmas, eta=0.0, noise=None, on_step=None):
    """Second-order exponential multistep (arXiv:2308.02157), one model call a step. With ``eta`` 0 the bytes of ComfyUI's
    ``res_multistep``: same operations, same order."""
    previous_down = previous = None
    for i in range(len(sigmas) - 1):
        denoised = denoise(x, sigmas[i])
        if on_step is not None:
            on_step(i, x, sigmas[i], denoised)
        down, factor, amount = down_step(sigmas[i], sigmas[i + 1], eta)
        if down == 0 or previous is None:
            x = x + (x - denoised) / sigmas[i] * (down - sigmas[i])
        else:
            t, t_old, t_next, t_previous = (-s.log() for s in (sigmas[i], previous_down, down, sigmas[i - 1]))
            h = t_next - t
            c2 = (t_previous - t_old) / h
            phi1, phi2 = _phi1(-h), _phi2(-h)
            b1 = torch.nan_to_num(phi1 - phi2 / c2, nan=0.0)
            b2 = torch.nan_to_num(phi2 / c2, nan=0.0)
            x = h.neg().exp() * x + h * (b1 * denoised + b2 * previous)
        if factor is not None:
            x = _noised(x, factor, amount, noise(sigmas[i], sigmas[i + 1]))
        previous, previous_down = denoised, down
    return x


def res_2s(denoise, x, sigmas, eta=0.0, noise=None, on_step=None):
    """Second-order exponential Runge-Kutta with its second stage halfway in ``log sigma``: two model calls a step, one in the last.

    In ``lambda = -log sigma`` a flow latent follows ``dx/dlambda = x0 - x``, linear but for the model's ``x0``: Hochbruck and Ostermann's
    two-stage method with ``c2 = 1/2`` (Acta Numerica 2010, 5.3; the method's weights are ``b2 = phi2 / c2``, ``b1 = phi1 - b2``).
    """
    c2 = 0.5
    for i in range(len(sigmas) - 1):
        sigma = sigmas[i]
        denoised = denoise(x, sigma)
        if on_step is not None:
            on_step(i, x, sigma, denoised)
        down, factor, amount = down_step(sigma, sigmas[i + 1], eta)
        if down == 0:
            x = x + (x - denoised) / sigma * (down - sigma)
            continue
        h = sigma.log() - down.log()
        middle = (-c2 * h).exp() * x + h * (c2 * _phi1(-c2 * h)) * denoised
        second = denoise(middle, sigma * (-c2 * h).exp())
        b2 = _phi2(-h) / c2
        x = (-h).exp() * x + h * ((_phi1(-h) - b2) * denoised + b2 * second)
        if factor is not None:
            x = _noised(x, factor, amount, noise(sigma, sigmas[i + 1]))
    return x


ONE_CLOCK = {"euler": euler, "res_multistep": res_multistep, "res_2s": res_2s}
NAMES = ("turbo_euler", *ONE_CLOCK)

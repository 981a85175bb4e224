"""Twelve data sets for the INT8 ops: those of ``data`` that fit, and rows that show ties, extremes and flushed subnormals."""

import torch
from h3_vortex.tests.gpu import data

EVERY = (
    "normal", "lognormal", "cauchy", "outlier_channels", "row_scales", "small_ints", "one_hot", "zero_rows", "tiny", "huge", "finite_bits",
    "specials",
)


def small_ints(shape, device, std=1.0):
    return torch.randint(-3, 4, shape, device=device).float()


def one_hot(shape, device, std=1.0):
    at = torch.randint(0, shape[1], (shape[0], 1), device=device)
    return torch.zeros(shape, device=device).scatter_(1, at, 5.0)


def zero_rows(shape, device, std=1.0):
    x = torch.randn(shape, device=device)
    x[::3] = 0.0
    x[1::3] *= -0.0
    return x


def tiny(shape, device, std=1.0):
    return torch.randn(shape, device=device) * torch.exp2(torch.rand(shape[0], 1, device=device) * 50 - 126)


def huge(shape, device, std=1.0):
    return torch.randn(shape, device=device).clamp(-3, 3) * 1e38


def draw(name):
    own = {"small_ints": small_ints, "one_hot": one_hot, "zero_rows": zero_rows, "tiny": tiny, "huge": huge}
    return own.get(name) or data.draw(name)


def weight(name, width, device):
    """A norm weight to go with a data set: near 1, heavy-tailed, or any finite bits."""
    if name in ("cauchy", "row_scales"):
        return (torch.randn(width, device=device) * torch.exp(torch.randn(width, device=device) * 3)).bfloat16()
    if name == "finite_bits":
        return data.finite_bits((width,), device)
    return (1 + 0.1 * torch.randn(width, device=device)).bfloat16()

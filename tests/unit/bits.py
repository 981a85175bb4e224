"""Adversarial bf16 tensors for hypothesis: zeros of both signs, subnormals, NaN, infinities, rounding midpoints, any bit pattern."""

import torch
from hypothesis import strategies as st

SPECIAL = (
    0x0000, 0x8000,  # zeros
    0x0001, 0x8001, 0x007F, 0x0080,  # smallest and largest subnormal, smallest normal
    0x3F80, 0xBF80, 0x3F81, 0x3F7F,  # around one
    0x4080, 0x4081, 0x3B80, 0x3C00,  # powers whose sums with one are midpoints
    0x7F7F, 0xFF7F, 0x7F80, 0xFF80,  # largest finite, infinities
    0x7FC0, 0xFFC1, 0x7F81,  # NaNs
)
patterns = st.lists(st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF)), min_size=1, max_size=24)
seeds = st.integers(0, 2**31 - 1)


def fill(pool, seed, *shape):
    """A bf16 tensor of ``shape`` whose bit patterns are drawn from ``pool``."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(0, len(pool), shape, generator=generator)
    return torch.tensor(pool, dtype=torch.int32)[at].to(torch.int16).view(torch.bfloat16)


def same_bytes(a, b):
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def same_bytes_or_nan(a, b):
    """Equal bytes, any NaN for a NaN: on the CPU torch's own NaN bytes differ between a loop's vectors and its tail."""
    nan = torch.isnan(a)
    return a.shape == b.shape and torch.equal(nan, torch.isnan(b)) and same_bytes(a.masked_fill(nan, 0), b.masked_fill(nan, 0))

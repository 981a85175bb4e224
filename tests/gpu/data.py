"""Data sets that find wrong roundings: ordinary, heavy-tailed, badly scaled, subnormal, and every bit pattern there is."""

import contextlib

import pytest
import torch
from h3_vortex.kernels.dispatch import use_backend

# one token, around a tile, one past the canonical 37,810 rounded up to 16, and a long job whose offsets pass 2^31 elements
ROWS = (1, 15, 16, 127, 129, 37_824, 110_000)
CANONICAL = 37_810
EVERY = ("normal", "lognormal", "cauchy", "outlier_channels", "row_scales", "subnormal", "finite_bits", "specials")


def any_bits(shape, device):
    return torch.randint(-32768, 32768, shape, device=device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def finite_bits(shape, device):
    bits = torch.randint(0, 65536, shape, device=device, dtype=torch.int32)
    return torch.where((bits & 0x7F80) == 0x7F80, bits & 0xBF7F, bits).to(torch.int16).view(torch.bfloat16)


def draw(name):
    """``draw(shape, device, std=1)`` of the data set ``name``, for ``stock.make``."""

    def normal(shape, device, std=1.0):
        return torch.randn(shape, device=device).mul_(std)

    def lognormal(shape, device, std=1.0):
        return normal(shape, device, std) * torch.exp(normal(shape, device) * 1.5)

    def cauchy(shape, device, std=1.0):
        return normal(shape, device, std) / normal(shape, device).abs().clamp_min(1e-6)

    def outlier_channels(shape, device, std=1.0):
        channels = torch.exp(normal(shape[-1:], device) * 2)
        channels[::173] *= 300
        return normal(shape, device, std) * channels

    def row_scales(shape, device, std=1.0):
        return normal(shape, device, std) * torch.exp2(torch.rand(shape[0], *[1] * (len(shape) - 1), device=device) * 40 - 30)

    def subnormal(shape, device, std=1.0):
        return normal(shape, device, std) * 2e-38

    def bits(shape, device, std=1.0):
        return finite_bits(shape, device).float() * 1.003  # off the bf16 grid where the receiver is fp32

    def specials(shape, device, std=1.0):
        if len(shape) == 1:  # a weight: one bad entry per column is enough
            return lognormal(shape, device, std)
        x = normal(shape, device, std).to(torch.bfloat16)
        flat = x.view(-1, shape[-1])
        flat[0::7] = any_bits(flat[0::7].shape, device)
        flat[1::7] = 0.0
        flat[2::7, 5::61] = float("nan")
        flat[3::7, 3::97] = float("inf")
        flat[4::7] *= -0.0
        flat[5::7, 9::13] = -float("inf")
        return x

    sets = {"normal": normal, "lognormal": lognormal, "cauchy": cauchy, "outlier_channels": outlier_channels,
            "row_scales": row_scales, "subnormal": subnormal, "finite_bits": bits, "specials": specials}
    return sets[name]


def segments(count, tokens):
    """``count`` segments over ``tokens`` rows, aligned to nothing, some of them empty or one row long."""
    cuts = sorted(torch.randint(0, tokens + 1, (count - 1,), generator=torch.Generator().manual_seed(count)).tolist())
    edges = [0, *cuts, tokens]
    return [(a, b, i % 6) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]


def differing(got, expected):
    """How many elements of two tensor tuples differ in their bytes."""
    assert len(got) == len(expected)
    total = 0
    for ours, stock in zip(got, expected, strict=True):
        assert ours.shape == stock.shape and ours.dtype == stock.dtype, (ours.shape, ours.dtype, stock.shape, stock.dtype)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
        total += int((ours.contiguous().view(kind) != stock.contiguous().view(kind)).sum())
    return total


@contextlib.contextmanager
def poisoned():
    """What ``torch.empty`` and ``empty_like`` hand out on the GPU is full of 0xA5: without it, memory that stock just freed could hold the
    right result where a kernel writes nothing."""
    originals = torch.empty, torch.empty_like

    def filled(original):
        def make(*args, **kwargs):
            tensor = original(*args, **kwargs)
            if tensor.is_cuda and tensor.numel():
                tensor.view(-1).view(torch.uint8).fill_(0xA5)
            return tensor

        return make

    torch.empty, torch.empty_like = map(filled, originals)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = originals


def assert_stock_bytes(case, backend):
    """Runs ``backend`` and stock on fresh copies of the same inputs: no byte may differ."""
    expected = case.stock(*case.inputs())
    arguments = case.inputs()
    with use_backend(backend), poisoned():
        got = case.ours(*arguments)
    wrong = differing(got, expected)
    assert wrong == 0, f"{wrong} of {sum(t.numel() for t in expected)} elements differ from stock"


def require_memory(tokens, width):
    """Skip a size that this GPU cannot hold beside stock's copies and the fp32 draws."""
    needed = 12 * 2 * tokens * width
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < needed:
        pytest.skip(f"{tokens} rows of {width} need about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free")

"""The GPU tier: kernels against the literal stock chain, byte for byte.

Skipped in one line where there is no CUDA device; H3_REQUIRE=gpu makes that an error.
"""

import os
from pathlib import Path

import pytest
import torch
from h3_vortex.kernels.dispatch import Op

HERE = Path(__file__).resolve().parent
REASON = None if torch.cuda.is_available() else "gpu tier: torch sees no CUDA device here; run it on a machine with one"


def pytest_collection_modifyitems(items):
    if REASON and "gpu" in os.environ.get("H3_REQUIRE", "").split(",") and any(HERE in Path(item.path).parents for item in items):
        raise pytest.UsageError(REASON)


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The device under test. Sets comfy-kitchen up as ComfyUI does: its Triton backend off."""
    if REASON:
        pytest.skip(REASON)
    import comfy_kitchen

    comfy_kitchen.registry.disable("triton")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def seeded(gpu):
    torch.manual_seed(0)


@pytest.fixture
def reference_forbidden(monkeypatch):
    """Every op's reference raises: what passes under this fixture ran a fast path."""

    def refuse(*_):
        raise AssertionError("the reference ran where a fast path was expected")

    for op in Op.registry.values():
        monkeypatch.setattr(op.backends["eager"], "run", refuse)

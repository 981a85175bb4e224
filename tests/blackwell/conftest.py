"""The Blackwell tier: FP4 tensor cores. Skipped in one line elsewhere; H3_REQUIRE=blackwell makes that an error."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def missing():
    if not torch.cuda.is_available():
        return "blackwell tier: torch sees no CUDA device here; run it on an SM100 or newer GPU"
    if torch.cuda.get_device_capability() < (10, 0):
        return f"blackwell tier: {torch.cuda.get_device_name()} has no FP4 tensor cores; run it on an SM100 or newer GPU"
    return None


REASON = missing()


def pytest_collection_modifyitems(items):
    if REASON and "blackwell" in os.environ.get("H3_REQUIRE", "").split(",") and any(HERE in Path(item.path).parents for item in items):
        raise pytest.UsageError(REASON)


@pytest.fixture(scope="session", autouse=True)
def blackwell():
    """Sets comfy-kitchen up as ComfyUI does: its Triton backend off."""
    if REASON:
        pytest.skip(REASON)
    import comfy_kitchen

    comfy_kitchen.registry.disable("triton")

"""H3 Accelerate in this process: patched latents are stock latents, byte for byte, for every storage form of the checkpoint."""

import pytest
import torch
from h3_vortex.h3.tiny import FORMATS
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample

EAGER = Features(allow_eager=True)  # this tier runs on the CPU, where every op has its reference only


@pytest.fixture(scope="module")
def load(comfy, tiny_models):
    """Loads a tiny checkpoint by format name, once per module."""
    loaded = {}

    def get(name):
        if name not in loaded:
            with torch.inference_mode():  # as ComfyUI loads and runs
                loaded[name] = comfy.sd.load_diffusion_model(str(tiny_models[name]))
        return loaded[name]

    return get


@pytest.mark.parametrize("kinds", ["text", "all"])
@pytest.mark.parametrize("name", FORMATS)
def test_patched_is_stock(load, name, kinds):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    model = load(name)
    positive = conditioning(kinds)
    expected = sample(model, positive)
    patched = accelerate(model, EAGER)
    assert same(sample(patched, positive), expected)
    told = report(patched)
    assert told["stepped_aside"] is None and told["model_calls"] == 4
    blocks = 4 * len(model.model.diffusion_model.blocks)
    for op in ("norm_modulate", "gate_norm_modulate", "gate", "qk_norm_rope"):
        assert fused(told, op) == blocks, told["ops"]
    if not name.endswith("int8_convrot"):  # there stock folds the activation into kitchen's own call, on CUDA only
        assert fused(told, "swiglu") == blocks

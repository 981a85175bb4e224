"""NVFP4 as Blackwell runs it (both operands quantised), at full width on a GPU without FP4 tensor cores, through a reference GEMM.

What the product then is differs from the tensor cores' in its last bits; that both sides feed it the same bytes does not.
"""

import pytest
import torch
from h3_vortex.benchmarks import _comfy, full_size, shapes, trajectory
from h3_vortex.frontdoor import locate
from h3_vortex.kernels import nvfp4_quantize
from h3_vortex.tests.host import w4a4

NEEDED_BYTES = 48 * 2**30
PER_BLOCK = ("norm_modulate_nvfp4", "gate_norm_modulate_nvfp4", "nvfp4_quantize", "swiglu_nvfp4", "qk_norm_rope", "gate")


@pytest.fixture(scope="module")
def core(gpu):
    try:
        found = locate.find_comfyui(None)
    except locate.NotFound:
        found = None
    if found is None:
        pytest.skip("needs a ComfyUI: set COMFYUI_DIR")
    if torch.cuda.get_device_capability(gpu) >= (10, 0):
        pytest.skip("this GPU has FP4 tensor cores: tests/blackwell and run.py bench trajectory --weights nvfp4 use them")
    if nvfp4_quantize.stock_contract(gpu) != "cuda":
        pytest.skip("comfy-kitchen has no CUDA kernels here, whose bytes the fused ops give")
    if torch.cuda.get_device_properties(gpu).total_memory < NEEDED_BYTES:
        pytest.skip(f"the 50 blocks at 37,810 rows need {NEEDED_BYTES / 2**30:.0f} GiB of GPU memory")
    return _comfy.load(gpu)


def test_blocks_0_24_and_49_equal_stock(core, gpu):
    w4a4.register(gpu.type)
    chosen = trajectory.arguments(["--weights", "nvfp4", "--attention", "cudnn"])
    with torch.inference_mode():
        _comfy.first_sdpa_call(core, gpu)
        gates = trajectory.Run(core, shapes.model("h3"), chosen, gpu)
        diffusion = gates.stock.model.diffusion_model
        weight_only = full_size.run_step(core, gates.stock, full_size.make_inputs(core, gates.stock, shapes.job("small"), gpu))
        with w4a4.native(diffusion) as layers:
            assert layers == 4 * len(diffusion.blocks) == 200
            quantised = full_size.run_step(core, gates.stock, full_size.make_inputs(core, gates.stock, shapes.job("small"), gpu))
            assert not torch.equal(quantised[0], weight_only[0]), "activations were not quantised"
            row, equal = gates.blocks()
    print(row["detail"])
    assert equal and list(row["detail"]) == ["0", "24", "49"], row
    told = trajectory.candidates.report("exact", gates.reporting)["ops"]
    for op in PER_BLOCK:
        assert told[op]["fused"] == {"cuda": 50}, (op, told[op])
        assert not told[op]["stock"], (op, told[op])
    for plain in ("norm_modulate", "gate_norm_modulate", "swiglu"):
        assert not told.get(plain, {}).get("fused"), told[plain]

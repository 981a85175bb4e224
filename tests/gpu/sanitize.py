"""Every CUDA kernel once on small shapes, for compute-sanitizer: no pytest, no big tensors, a few seconds.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py

Widths and row counts leave every kernel with partial blocks, so an access past an end has somewhere to go. The results are compared
with stock as well. An op adds its calls to ``RUNS``.
"""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # one allocation per tensor, so that memcheck sees its ends

import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def load():
    spec = importlib.util.spec_from_file_location("h3_vortex_loader", ROOT / "tests" / "conftest.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def bf16_ops(device):
    """The six bf16 ops; yields ``(description, differing elements)``."""
    from h3_vortex.kernels import stock
    from h3_vortex.kernels.dispatch import use_backend
    from h3_vortex.tests.gpu.data import differing

    for op in stock.OPS:
        for tokens, width, heads, ffn in ((1, 8, 1, 8), (37, 1032, 3, 1000), (19, 5376, 9, 14336)):
            for table_dtype in (torch.float32, torch.bfloat16):
                case = stock.make(op, tokens, device, width=width, heads=heads, ffn=ffn, table_dtype=table_dtype)
                with use_backend("cuda"):
                    got = case.ours(*case.inputs())
                yield f"{op} {tokens} x {width} {table_dtype}", differing(got, case.stock(*case.inputs()))


def int8_ops(device):
    """The four INT8-ConvRot ops; widths that leave half-warps, steps and warps without a group."""
    from h3_vortex.benchmarks.int8_cases import OPS, make
    from h3_vortex.kernels.dispatch import use_backend
    from h3_vortex.tests.gpu.data import differing

    for op in OPS:
        for tokens, width in ((3, 256), (37, 1280), (19, 5376)):
            case = make(op, tokens, device, width=width, ffn=width)
            with use_backend("cuda"):
                got = case.ours(*case.inputs())
            yield f"{op} {tokens} x {width}", differing(got, case.stock(*case.inputs()))


def nvfp4_ops(device):
    """The five NVFP4 ops, tensor scale computed and given, and the software conversions; yields ``(description, differing elements)``.

    Shapes have an even number of 16 x 16 tiles: with an odd one comfy-kitchen's own ``quantize_nvfp4`` (0.2.31), which the results are
    compared with, writes 128 bytes past its output. No layer of H3 has such a width.
    """
    from h3_vortex.kernels import nvfp4_quantize, stock
    from h3_vortex.kernels.dispatch import use_backend
    from h3_vortex.tests.gpu.data import differing

    for op in stock.NVFP4_OPS:
        for tokens, width, ffn in ((1, 32, 32), (19, 1008, 1008), (19, 5376, 14336), (130, 96, 96)):
            for scale in (None, 0.0015):
                for table_dtype in (torch.float32, torch.bfloat16) if "modulate" in op else (torch.float32,):
                    case = stock.make(op, tokens, device, width=width, ffn=ffn, table_dtype=table_dtype, tensor_scale=scale)
                    with use_backend("cuda"):
                        got = case.ours(*case.inputs())
                    yield f"{op} {tokens} x {width} {table_dtype} {scale}", differing(got, case.stock(*case.inputs()))
    x = torch.randn(20, 1008, device=device).bfloat16()
    strip = nvfp4_quantize.Strip("nvfp4_quantize", ("P", "q"), x.shape, x.get_device(), True, FORCE_SOFTWARE=1)
    yield "nvfp4_quantize in software", differing(strip(device, None, (x.data_ptr(),), (x.stride(0),)), stock.quantize_nvfp4(x))


RUNS = [bf16_ops, int8_ops, nvfp4_ops]


def main() -> int:
    load()
    import comfy_kitchen

    comfy_kitchen.registry.disable("triton")
    torch.manual_seed(0)
    wrong = 0
    for run in RUNS:
        for description, differing in run(torch.device("cuda", torch.cuda.current_device())):
            torch.cuda.synchronize()
            wrong += bool(differing)
            print(f"{'DIFFERS' if differing else 'ok':8}{description}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

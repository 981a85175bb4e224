"""``run.py bench gemm``: the four projections of a block, stock GEMM against every cuBLASLt schedule that gives its bytes.

Random data. A schedule counts only when its output equals stock's byte for byte on two data sets; see ``kernels/gemm_schedule.py``.
"""

import sys

import torch

from ..kernels.cublaslt import Problem
from ..kernels.gemm_schedule import Operands, search
from . import command_line, model_arguments, shapes
from .command_line import listed, one_of, positive, saying
from .harness import ceilings, guarded, log, out_path, start_result

KINDS = ("bf16", "fp8", "nvfp4")
ROWS = (37_810, 37_742, 15_499, 109_162)  # canonical, another text length, 864x480x124, 1344x768x362


def operands(kind, m, n, k, device, seed):
    """One random data set of a :class:`Problem` and the stock call on it."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, k, generator=generator, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, generator=generator, device=device, dtype=torch.bfloat16).mul_(0.02)
    if kind == "bf16":
        return Operands(x, w)
    from comfy_kitchen.tensor import QuantizedTensor

    layout = {"fp8": "TensorCoreFP8Layout", "nvfp4": "TensorCoreNVFP4Layout"}[kind]
    qx, qw = (QuantizedTensor.from_float(tensor, layout) for tensor in (x, w))
    if kind == "fp8":
        return Operands(qx._qdata, qw._qdata, qx._params.scale, qw._params.scale)
    alpha = (qx._params.scale * qw._params.scale).reshape(1)
    return Operands(qx._qdata, qw._qdata, qx._params.block_scale, qw._params.block_scale, alpha)


def stock_call(kind):
    """What comfy-kitchen's layouts run for this kind, on the operands of :func:`operands`."""
    if kind == "bf16":
        return lambda d: torch.nn.functional.linear(d.x, d.w)
    if kind == "fp8":
        from comfy_kitchen.tensor.fp8 import _fp8_scaled_mm

        return lambda d: _fp8_scaled_mm(d.x, d.w.t(), d.x_scale, d.w_scale, out_dtype=torch.bfloat16)
    import comfy_kitchen

    one = torch.ones((), device="cuda")
    return lambda d: comfy_kitchen.scaled_mm_nvfp4(d.x, d.w, one, one, d.x_scale, d.w_scale, out_dtype=torch.bfloat16, alpha=d.alpha)


def main(argv):
    layers = ("fc2", "qkv", "out_proj", "fc1")
    parser = command_line.parser("gemm", __doc__)
    model_arguments.add_device(parser)
    parser.add_argument("--kinds", type=listed(one_of("kind", KINDS)), default=KINDS, help=f"(default: {','.join(KINDS)})")
    parser.add_argument("--rows", type=listed(positive), default=ROWS, help=f"token counts (default: {','.join(map(str, ROWS))})")
    parser.add_argument("--layers", type=listed(one_of("layer", layers)), default=layers, help=f"(default: {','.join(layers)})")
    parser.add_argument("--model", type=saying(shapes.model), default="h3", help=f"{', '.join(shapes.MODELS)} (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time budget of one search (default: 1)")
    args = parser.parse_args(argv)
    if args.device.type != "cuda":
        sys.exit("gemm times cuBLASLt schedules: it needs an NVIDIA GPU and a CUDA build of torch, and has no harness check on a CPU")
    device, model = args.device, args.model
    result = start_result("gemm", device, argv)
    with guarded(result, out_path(args.out, "gemm", device)):
        result["ceilings"] = ceilings(device, 37_810, model.hidden)
        for kind in args.kinds:
            for layer in args.layers:
                n, k = model.gemms()[layer]
                for rows in args.rows:
                    m = -(-rows // 16) * 16 if kind == "nvfp4" else rows  # kitchen pads the rows of NVFP4 activations to 16
                    problem = Problem(kind, m, n, k)
                    data = [operands(kind, m, n, k, device, seed) for seed in (0, 1)]
                    try:
                        outcome = search(problem, data, stock_call(kind), args.seconds)
                    except RuntimeError as error:  # stock itself cannot run this kind on this GPU
                        result["rows"].append({"layer": layer, "problem": str(problem), "reason": f"stock: {error}"})
                        log(layer, problem, "stock:", str(error).splitlines()[0])
                        continue
                    tflops = 2 * m * n * k / 1e9
                    row = {"layer": layer, **outcome.as_dict(), "candidates": [
                        {"config": c.config.as_dict(), "origin": c.origin, "verdict": c.verdict, "ms": c.ms,
                         "TFLOPs": tflops / c.ms if c.ms else None} for c in outcome.candidates if c.verdict != "not tried"]}
                    result["rows"].append(row)
                    log(f"{layer:8} {problem}: {row['exact']} exact, {row['differs']} differ of {row['tried']}; stock", outcome.stock_ms,
                        "best", outcome.best_ms, "->", outcome.reason)
                    del data
    return 0

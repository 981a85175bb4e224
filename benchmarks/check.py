"""``run.py bench check``: for this machine, each op and backend: can it run, does it give stock's bytes, how long does it take.

On a GPU also the NVFP4 product of FC2 through cuBLASLt: whether the GPU has it, and what a schedule search finds. A few seconds; the inputs
are random and smaller than a real job (``kernels`` measures at full size). ``--out FILE`` keeps all of it as the evidence to send.
"""

import contextlib
import sys

import torch

from ..kernels import stock
from ..kernels.cublaslt import Problem
from ..kernels.gemm_schedule import search
from . import command_line, gemm, int8_cases, model_arguments, shapes
from .command_line import listed, one_of
from .harness import guarded, pick_device, start_result
from .op_cases import as_comfyui, backends, device_times, make, stock_problem, wrong_elements

OPS = (*stock.OPS, *stock.NVFP4_OPS, *int8_cases.OPS)
TOKENS = {"cuda": 4_099, "cpu": 37}
SMALL = {"width": 512, "heads": 2, "ffn": 512}  # a CPU only shows that the references run


def check(op: str, device, tokens: int) -> list[dict]:
    """One row per backend of ``op``: ``available`` or ``reason``, ``differing`` elements, ``ms``, ``stock_ms``, ``ratio``."""
    options = {} if device.type == "cuda" else {key: value for key, value in SMALL.items() if key != "heads" or op in stock.OPS}
    case = make(op, tokens, device, **options)
    stock_reason = stock_problem(case)
    rows = []
    for name, reason in backends(op, case).items():
        row = {"op": op, "backend": name, "reason": reason or stock_reason}
        if row["reason"] is None:
            times = device_times(case, [name], device, 5)
            ms, stock_ms = times[name]["median"], times["stock"]["median"]
            row |= {"differing": wrong_elements(case, name), "ms": ms, "stock_ms": stock_ms, "ratio": stock_ms / ms}
        rows.append(row)
    return rows


def run_check(device=None, ops=OPS) -> list[dict]:
    """The rows of :func:`check` for all ops on ``device`` (default: the GPU where there is one)."""
    device = pick_device(device)
    as_comfyui()
    torch.manual_seed(0)
    return [row for op in ops for row in check(op, device, TOKENS[device.type])]


def schedule(device) -> dict:
    """What the schedule search finds for the NVFP4 product of FC2: a row with ``reason`` and, where there is one, the ratio to stock."""
    n, k = shapes.model("h3").gemms()["fc2"]
    problem = Problem("nvfp4", -(-TOKENS["cuda"] // 16) * 16, n, k)
    outcome = search(problem, [gemm.operands("nvfp4", problem.m, n, k, device, seed) for seed in (0, 1)], gemm.stock_call("nvfp4"))
    return {"op": "gemm_schedule", "backend": "cublaslt", **outcome.as_dict()}


def line(row: dict, speeds: bool) -> str:
    head = f"{row['op']:24} {row['backend']:7}"
    if row["reason"] is not None:
        return f"{head} not here: {row['reason']}"
    verdict = "stock's bytes" if not row["differing"] else f"{row['differing']} ELEMENTS DIFFER"
    return f"{head} {verdict:20} {row['ms']:8.3f} ms, stock {row['stock_ms']:8.3f} ms" + (f", {row['ratio']:5.2f}x" if speeds else "")


def main(argv):
    parser = command_line.parser("check", __doc__)
    model_arguments.add_device(parser, out="also write everything to this JSON file (default: keep nothing)")
    parser.add_argument("--ops", type=listed(one_of("op", OPS)), default=list(OPS), help="names, comma separated (default: all)")
    args = parser.parse_args(argv)
    device = args.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}", flush=True)
    result = start_result("check", device, argv)
    with guarded(result, args.out) if args.out else contextlib.nullcontext():
        for op in args.ops:
            for row in run_check(device, (op,)):
                result["rows"].append(row)
                print(line(row, device.type == "cuda"), flush=True)
        if device.type == "cuda":
            result["rows"].append(schedule(device))
            print(f"{'fc2 schedule':24} cublaslt {result['rows'][-1]['reason']}", flush=True)
    wrong = any(row.get("differing") for row in result["rows"])
    if wrong:
        print("An op that differs is not used in a run: H3 Accelerate verifies each one first. Please report this.", file=sys.stderr)
    return int(wrong)

"""``python benchmarks check``: for this machine, each op and backend: can it run, does it give stock's bytes, how long does it take.

A few seconds. The inputs are random and smaller than a real job; ``kernels`` measures at full size.
"""

import argparse
import sys

import torch

from ..kernels import stock
from . import int8_cases
from .harness import pick_device
from .op_cases import as_comfyui, backends, device_times, make, wrong_elements

OPS = (*stock.OPS, *stock.NVFP4_OPS, *int8_cases.OPS)
TOKENS = {"cuda": 4_099, "cpu": 37}
SMALL = {"width": 512, "heads": 2, "ffn": 512}  # a CPU only shows that the references run


def check(op: str, device, tokens: int) -> list[dict]:
    """One row per backend of ``op``: ``available`` or ``reason``, ``differing`` elements, ``ms``, ``stock_ms``, ``ratio``."""
    options = {} if device.type == "cuda" else {key: value for key, value in SMALL.items() if key != "heads" or op in stock.OPS}
    case = make(op, tokens, device, **options)
    try:
        case.stock(*case.inputs())
        stock_reason = None
    except (RuntimeError, AssertionError, AttributeError) as error:  # kitchen and torch say in their own ways what they lack
        stock_reason = f"stock cannot run here: {str(error).splitlines()[0]}"
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


def line(row: dict) -> str:
    head = f"{row['op']:24} {row['backend']:7}"
    if row["reason"] is not None:
        return f"{head} not here: {row['reason']}"
    verdict = "stock's bytes" if not row["differing"] else f"{row['differing']} ELEMENTS DIFFER"
    return f"{head} {verdict:20} {row['ms']:8.3f} ms, stock {row['stock_ms']:8.3f} ms, {row['ratio']:5.2f}x"


def main(argv):
    parser = argparse.ArgumentParser(prog="benchmarks check", description=__doc__)
    parser.add_argument("--device", help="default cuda where there is one")
    parser.add_argument("--ops", default=",".join(OPS))
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: times say nothing here"
    print(f"torch {torch.__version__}, {where}", flush=True)
    wrong = False
    for op in args.ops.split(","):
        for row in run_check(args.device, (op,)):
            wrong |= bool(row.get("differing"))
            print(line(row), flush=True)
    if wrong:
        print("An op that differs is not used in a run: H3 Accelerate verifies each one first. Please report this.", file=sys.stderr)
    return int(wrong)

"""The INT8-ConvRot ops beside their stock chains: cases for the GPU tests, and what the three INT8 benchmarks share."""

import argparse
import functools

import torch

from ..kernels import norm_modulate_int8 as norm
from ..kernels import quantize_rotate_int8 as rotate
from ..kernels import swiglu_int8 as swiglu
from ..kernels.segments import row_map
from ..kernels.stock import Case, normal, tables, typical_segments
from . import shapes
from .harness import ceilings, differing, guarded, log, out_path, pick_device, repeat, start_result, summary

OPS = ("quantize_rotate_int8", "swiglu_int8", "norm_modulate_int8", "gate_norm_modulate_int8")
ROWS = (37_810, 15_499, 4_000, 1_000)  # canonical, 864x480x124, two small jobs


def make(op, tokens, device, *, width=5376, ffn=14336, table_dtype=torch.float32, segments=None, draw=normal, weight=None, eps=1e-5):
    """A :class:`kernels.stock.Case` for one INT8 op.

    Args:
        op: one of :data:`OPS`. ``tokens``: rows. ``width``: K or H. ``ffn``: F of ``swiglu_int8``. ``segments``: default a real job's.
        table_dtype: of the AdaLN tables, which stay ordinary: a modulated value above 2**119 is outside the contract of the norm forms.
        draw: ``draw(shape, device, std=)`` makes the activations. ``weight``: bf16 ``[width]``, default near 1.
    """

    def take(columns, std=1.0):
        return draw((tokens, columns), device, std=std).to(torch.bfloat16)

    if op == "quantize_rotate_int8":
        x = take(width, 1.59)
        return Case(rotate.quantize_rotate_int8, rotate.stock, lambda: (x,), tokens * (3 * width + 4))
    if op == "swiglu_int8":
        gate_up = take(2 * ffn)
        return Case(swiglu.swiglu_int8, swiglu.stock, lambda: (gate_up,), tokens * (5 * ffn + 4))
    segments = typical_segments(tokens) if segments is None else segments
    rows = row_map(segments, tokens, device)
    shift, scale, gate = tables(width, device, table_dtype, 3)
    weight = normal((width,), device, std=0.1).add_(1).to(torch.bfloat16) if weight is None else weight
    x = take(width, 1.59)
    if op == "norm_modulate_int8":
        return Case(
            lambda x: norm.norm_modulate_int8(x, weight, shift, scale, rows, eps),
            lambda x: norm.stock(x, weight, shift, scale, segments, eps),
            lambda: (x,), tokens * (3 * width + 4))
    if op == "gate_norm_modulate_int8":
        other = take(width, 0.5)
        return Case(
            lambda x: (*norm.gate_norm_modulate_int8(x, other, gate, weight, shift, scale, rows, eps), x),
            lambda x: (*norm.stock_gated(x, other, gate, weight, shift, scale, segments, eps), x),
            lambda: (x.clone(),), tokens * (7 * width + 4))
    raise ValueError(f"there is no INT8 case for op {op!r}; there are {', '.join(OPS)}")


def measure(op, tokens, device, reps, **options):
    """One row: ours and stock in turn, twice, in one process; traffic per second and its share of the copy; differing elements."""
    case = make(op, tokens, device, **options)
    wrong = sum(differing(a, b) for a, b in zip(case.ours(*case.inputs()), case.stock(*case.inputs()), strict=True))
    arguments = case.inputs()
    if op == "gate_norm_modulate_int8":
        arguments[0].mul_(1e-3)  # x is updated in place: hundreds of calls must not overflow it
    times = {case.ours: [], case.stock: []}
    for call in (case.stock, case.ours, case.ours, case.stock):
        times[call] += repeat(functools.partial(call, *arguments), device, reps)
    ours, stock = summary(times[case.ours]), summary(times[case.stock])
    return {
        "op": op, "rows": tokens, **{k: str(v) for k, v in options.items()}, "ours_ms": ours, "stock_ms": stock,
        "speedup": stock["median"] / ours["median"], "traffic_bytes": case.traffic, "TBs": case.traffic / ours["median"] / 1e9,
        "differing": wrong,
    }


def bench(kind, configurations, argv, description):
    """``main`` of an INT8 benchmark. ``configurations``: ``[(op, options)]`` of :func:`make`."""
    parser = argparse.ArgumentParser(prog=f"benchmarks {kind}", description=description)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="token counts")
    parser.add_argument("--reps", type=int, default=20, help="timed calls per pass; there are two passes each of ours and stock")
    parser.add_argument("--out", help="result file (default: benchmarks/results/KIND-DEVICE-DATE.json)")
    args = parser.parse_args(argv)
    device = pick_device("cuda")
    torch.manual_seed(0)
    result = start_result(kind, device, argv)
    failed = False
    with guarded(result, out_path(args.out, kind, device)):
        result["ceilings"] = ceilings(device, 37_810, shapes.model("h3").hidden)
        for op, options in configurations:
            for tokens in map(int, args.rows.split(",")):
                row = measure(op, tokens, device, args.reps, **options)
                row["share_of_copy"] = row["TBs"] / result["ceilings"]["copy_rows_TBs"]
                result["rows"].append(row)
                failed |= row["differing"] > 0
                log(f"{op:24} {tokens:6} rows {options}: stock {row['stock_ms']['median']:.3f} ms, ours {row['ours_ms']['median']:.3f} ms, "
                    f"{row['speedup']:.2f}x, {row['share_of_copy']:.2f} of copy, {row['differing']} differ")
    return int(failed)

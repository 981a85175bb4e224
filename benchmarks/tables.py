"""``run.py bench tables``: the README's measured tables, written from ``benchmarks/results`` and nothing else.

Every figure in the README between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` comes from here; a unit test fails when they
differ from the result files.
"""

import argparse
import json
import re

from .harness import RESULTS, ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.S)
WEIGHTS = {"bf16": "BF16", "int8": "INT8-ConvRot", "nvfp4": "NVFP4"}
ATTENTION = {"fa2": "SDPA (FlashAttention-2)", "cudnn": "cuDNN", "kitchen": "kitchen INT8", "sage": "SageAttention 1.0.6"}
CANDIDATES = {"exact": "fused, exact", "fastest": "fastest dense attention alone", "exact_fastest": "fused + fastest dense"}
ROWS = 37_810
# One run each; a configuration that two of them hold is shown from the later file of this order.
STEPS = ("step-h200", "step-fastest-h200", "step-864x480-bf16-h200", "step-864x480-int8-h200")


def load(name):
    """The result ``benchmarks/results/NAME.json``. Raises FileNotFoundError."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def where(*results):
    """One line on the machine a table comes from. Raises ValueError when the results come from different ones."""
    machines = {tuple(result["environment"][key] for key in ("gpu", "driver", "torch", "comfy_kitchen")) for result in results}
    if len(machines) != 1:
        raise ValueError(f"one table of several machines: {sorted(machines)}")
    gpu, driver, torch, kitchen = machines.pop()
    copies = sorted({f"{result['ceilings']['copy_TBs']:.2f}" for result in results})
    run = f"the same run {copies[0]}" if len(copies) == 1 else f"the same runs {copies[0]} to {copies[-1]}"
    return f"{gpu}, driver {driver}, torch {torch}, comfy-kitchen {kitchen}; copy bandwidth in {run} TB/s.\n"


def kernels():
    result = load("kernels-h200")
    rows = []
    for row in result["rows"]:
        if row["rows"] != ROWS or "cuda" not in row["backends"]:
            continue
        ours = row["backends"]["cuda"]
        form = [{"float32": "fp32 tables", "bfloat16": "bf16 tables"}.get(row.get("table_dtype"))]
        form.append("static scale" if "tensor_scale" in row else None)
        rows.append([
            f"`{row['op']}`", ", ".join(filter(None, form)), f"{row['stock_ms']['median']:.3f}", f"{ours['ms']['median']:.3f}",
            f"**{ours['speedup']:.2f}x**", f"{ours['share_of_copy']:.2f}", str(ours["differing"])])
    head = ["op", "form", "stock ms", "ours ms", "speed-up", "share of copy bandwidth", "differing bytes"]
    share = f"Shares are of a copy of {ROWS:,} rows of the stream, {result['ceilings']['copy_rows_TBs']:.2f} TB/s.\n"
    return where(result) + share + "\n" + table(head, rows)


def attention():
    result = load("attention-h200")
    measured = sorted((row for row in result["rows"] if "ms" in row), key=lambda row: row["ms"]["median"])
    rows = [
        [f"`{row['backend']}`", row["class"], f"{row['ms']['median']:.1f}", f"{row['TFLOPs']:.0f}", f"{row['speedup']:.2f}x",
         f"{row['relative_error']:.1e}", "yes" if row["equal_to_stock"] else "no"] for row in measured]
    head = ["backend", "class", "ms", "TFLOP/s", "against stock", "error against float64", "stock's bytes"]
    return where(result) + "\n" + table(head, rows)


def step():
    results = [load(name) for name in STEPS]
    shown = {}
    for result in results:
        stock = {}
        for row in (row for row in result["rows"] if "ms" in row):
            key = row["weights"], row["shape"], row["attention"]
            if row["candidate"] == "stock":
                stock[key] = row
            elif row["candidate"] == "exact" or not row["equal_to_stock"]:  # else stock's attention already is the fastest
                shown[(*key, row["candidate"])] = row, stock[key]
    rows = [[
        shape, f"{WEIGHTS[weights]} + {ATTENTION[attention]}", CANDIDATES[candidate],
        f"{stock['ms']['median'] / 1e3:.3f}", f"{row['ms']['median'] / 1e3:.3f}", f"**{row['speedup']['of_medians']:.3f}x**",
        str(row["ms"]["n"]), "equal" if row["equal_to_stock"] else "other", f"{row['peak_bytes'] / stock['peak_bytes']:.2f}"]
        for (weights, shape, attention, candidate), (row, stock) in sorted(shown.items(), key=_order)]
    head = ["job", "stock runs", "this pack", "stock s/step", "ours s/step", "speed-up", "rounds", "bytes", "peak memory, share of stock"]
    return where(*results) + "\n" + table(head, rows)


def _order(entry):
    (weights, shape, attention, candidate), _ = entry
    return shape != "canonical", list(WEIGHTS).index(weights), list(CANDIDATES).index(candidate), list(ATTENTION).index(attention)


TABLES = {"kernels": kernels, "attention": attention, "step": step}


def filled(text):
    """``text`` with the inside of every table block made anew from the result files."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def main(argv):
    argparse.ArgumentParser(prog="run.py bench tables", description=__doc__).parse_args(argv)
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables {', '.join(TABLES)} in {README.name}")
    return 0

"""``run.py bench plot``: docs/img/block.png and docs/img/roofline.png, drawn from result files and nothing else. Needs matplotlib.

block.png     device time of one block by group, stock beside this pack, for every weight storage and attention of the block results
roofline.png  how near the roof each op comes at 37,810 rows, stock's chain beside this pack: the bytes that must move over the time, as a
              share of copy bandwidth; attention and the four products as a share of the BF16 matmul rate. Both roofs were measured in the
              run that the point comes from. A read is cheaper than a write, so an op that reads more than it writes can pass a copy.
"""

import argparse
import json
import sys
from pathlib import Path

from . import command_line, shapes
from ._pack import ROOT
from .compare import result_of

RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "img"
ROWS = shapes.JOBS["canonical"].rows
WEIGHTS = {"bf16": "BF16", "int8": "INT8-ConvRot", "nvfp4": "NVFP4"}
SIDES = {"stock": "stock", "exact": "this pack"}
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#999933", "#882255", "#44aa99", "#ddaa77", "#777777")


def load(paths):
    return [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]


def block_bars(results):
    """[(label, {group: ms} of stock, of this pack)] of the configurations that have both; the four products are one group."""
    bars = []
    for result in results:
        sides = {}
        for row in result["rows"]:
            if row.get("candidate") in SIDES:
                groups = {"products": 0.0}
                for group, ms in row["groups_ms"].items():
                    if group.endswith(" GEMM"):
                        groups["products"] += ms
                    else:
                        groups[group] = ms
                sides.setdefault((row["weights"], row["attention"]), {})[row["candidate"]] = groups
        for (weights, attention), pair in sides.items():
            if set(pair) == set(SIDES):
                bars.append((f"{WEIGHTS[weights]}\n{attention} attention", pair["stock"], pair["exact"]))
    return bars


def draw_block(results, path):
    from matplotlib import pyplot

    bars = block_bars(results)
    if not bars:
        sys.exit("plot: no block result has both stock and exact rows; run.py bench block makes one")
    shared = ("attention", "products")
    seen = [side for _, *sides in bars for side in sides]
    rest = [group for group in dict.fromkeys(group for side in seen for group in side)
            if group not in shared and max(side.get(group, 0) for side in seen) >= 0.1]  # fmt: skip
    figure, (whole, parts) = pyplot.subplots(1, 2, figsize=(11, 1.2 + 1.3 * len(bars)), width_ratios=(2, 3), sharey=True)
    ticks = []
    for at, (label, *sides) in enumerate(bars):
        for below, (name, groups) in enumerate(zip(SIDES.values(), sides, strict=True)):
            y = -2.6 * at - below
            ticks.append((y, f"{label}\n{name}" if below == 0 else name))
            others = sum(ms for group, ms in groups.items() if group not in shared)
            left = 0.0
            for ms, colour in ((groups["attention"], "#bbbbbb"), (groups["products"], "#dddddd"), (others, "#333333")):
                whole.barh(y, ms, left=left, height=0.85, color=colour)
                left += ms
            whole.text(left, y, f" {left:.1f}", va="center", fontsize=8)
            left = 0.0
            for group in rest:
                ms = groups.get(group, 0.0)
                parts.barh(y, ms, left=left, height=0.85, color=COLOURS[rest.index(group) % len(COLOURS)])
                left += ms
            parts.text(left, y, f" {left:.1f}", va="center", fontsize=8)
    whole.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=8)
    whole.set_title("one block, ms: attention (grey), products (light), the rest (black)", fontsize=9)
    parts.set_title("the rest by group, ms", fontsize=9)
    for axes in (whole, parts):
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[i % len(COLOURS)]) for i in range(len(rest))]
    parts.legend(handles, rest, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, path, results[0])


def roof_shares(kernels, attention=None, gemm=None):
    """[(name, roof, share of it that stock reaches, share that this pack reaches or None)], roof ``copy`` or ``matmul``, nearest last."""
    copy, shares = kernels["ceilings"]["copy_rows_TBs"], []
    for row in kernels["rows"]:
        if row["rows"] == ROWS and row.get("table_dtype") != "bfloat16" and "tensor_scale" not in row and "cuda" in row.get("backends", ()):
            stock = row["traffic_bytes"] / row["stock_ms"]["median"] / 1e9 / copy
            shares.append((row["op"], "copy", stock, row["backends"]["cuda"]["share_of_copy"]))
    shares.sort(key=lambda entry: entry[3])
    products, peak = [], None
    for row in gemm["rows"] if gemm else ():
        n, k = shapes.MODELS["h3"].gemms()[row["layer"]]
        if row["problem"] == f"bf16 {ROWS}x{n}x{k}":
            peak = gemm["ceilings"]["matmul_bf16_TFLOPs"]
            products.append((f"{row['layer']} (BF16)", "matmul", 2 * ROWS * n * k / row["stock_ms"] / 1e9 / peak, None))
    for row in attention["rows"] if attention else ():
        if "TFLOPs" in row and row["rows"] == ROWS:
            peak = attention["ceilings"]["matmul_bf16_TFLOPs"]
            products.append((f"attention: {row['backend']}", "matmul", row["TFLOPs"] / peak, None))
    return sorted(products, key=lambda entry: entry[2]) + shares


def draw_roofline(kernels, attention, gemm, path):
    from matplotlib import pyplot

    shares = roof_shares(kernels, attention, gemm)
    figure, axes = pyplot.subplots(figsize=(9, 0.8 + 0.24 * len(shares)))
    for y, (_, roof, stock, ours) in enumerate(shares):
        if ours is not None:
            axes.plot((stock, ours), (y, y), color="#bbbbbb", linewidth=1.2, zorder=1)
            axes.scatter(ours, y, color="#228833", s=28, zorder=3)
        axes.scatter(stock, y, marker="x" if roof == "copy" else "s", color="#ee6677" if roof == "copy" else "#4477aa", s=24, zorder=2)
    copy, peak = kernels["ceilings"]["copy_rows_TBs"], kernels["ceilings"]["matmul_bf16_TFLOPs"]
    axes.axvline(1, color="black", linewidth=1)
    legend = {
        f"this pack, share of copy bandwidth ({copy:.2f} TB/s)": ("o", "#228833"),
        "stock's chain, the same bytes": ("x", "#ee6677"),
        f"share of the BF16 matmul rate ({peak:.0f} TFLOP/s)": ("s", "#4477aa"),
    }
    for label, (marker, colour) in legend.items():
        axes.scatter([], [], marker=marker, color=colour, s=24, label=label)
    axes.set_yticks(range(len(shares)), [name for name, *_ in shares], fontsize=8)
    axes.set_xlim(0, 1.15)
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    axes.grid(axis="x", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path, kernels)


def save(figure, path, result):
    from matplotlib import pyplot

    environment = result["environment"]
    where = f"{environment['gpu']}, torch {environment['torch']}, {result['created'][:10]}"
    figure.supxlabel(f"{where}; random weights and data", fontsize=7, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot.close(figure)
    print("wrote", path)


def only(folder, kind):
    """The widest result of ``kind`` in ``folder`` that holds real speeds, the newest of equally wide ones; None without any."""
    found = [result for result in load(sorted(folder.glob("*.json"))) if result["kind"] == kind and result["speed_valid"]]
    return max(found, key=lambda result: (len(result["rows"]), result["created"]), default=None)


def main(argv):
    parser = command_line.parser("plot", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files (default: benchmarks/results)")
    parser.add_argument("--block", type=command_line.saying(result_of), nargs="+",
                        help="block results (default: block-*.json of that folder)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder for the images (default: docs/img)")
    chosen = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        sys.exit(f"plot needs matplotlib, which {sys.executable} has not: python -m pip install matplotlib; "
                 "or name another Python: run.py bench --python EXE plot")  # fmt: skip
    matplotlib.use("Agg")
    kernels, attention, gemm = (only(chosen.results, kind) for kind in ("kernels", "attention", "gemm"))
    if kernels is None:
        sys.exit(f"plot: no kernels result with real speeds in {chosen.results}; run.py bench kernels makes one")
    draw_block(chosen.block or load(sorted(chosen.results.glob("block-*.json"))), chosen.out / "block.png")
    draw_roofline(kernels, attention, gemm, chosen.out / "roofline.png")
    return 0

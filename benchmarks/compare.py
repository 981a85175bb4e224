"""Two result files of one kind side by side: the same rows' times, their ratio, and whether the bytes are the same."""

import json
from pathlib import Path

from . import command_line

# What names a row; a row has some of these.
KEY = (
    "model", "blocks", "weights", "shape", "rows", "attention", "candidate", "op", "table_dtype", "tensor_scale", "width", "layer",
    "problem", "backend", "gate", "steps",
)  # fmt: skip


def measured(row):
    """[(what, ms or None, hash or None)] of one row of any kind of result; nothing for a row that was skipped."""
    found = []
    if "ms" in row:  # step, attention hold a summary, check a number
        found.append((None, row["ms"]["median"] if isinstance(row["ms"], dict) else row["ms"], row.get("sha256")))
    for group, ms in row.get("groups_ms", {}).items():  # block
        found.append((group, ms, None))
    if "sum_ms" in row:
        found.append(("sum", row["sum_ms"], None))
    stock = row.get("stock_ms")  # the ops hold a summary, gemm a number; None where stock cannot run
    if stock is not None:
        found.append(("stock", stock["median"] if isinstance(stock, dict) else stock, None))
    if row.get("best_ms") is not None:
        found.append(("best exact schedule", row["best_ms"], None))
    for name, entry in row.get("backends", {}).items():
        found.append((name, entry["ms"]["median"], None))
    for side in ("stock", "ours"):  # trajectory
        if side in row:
            entry = row[side]
            digests = [entry[key] for key in ("sha256", "video_sha256", "audio_sha256") if key in entry]
            found.append((side, 1e3 * entry["seconds"] if "seconds" in entry else None, " ".join(digests)))
    return found


def keyed(result):
    """``{key: (ms or None, hash or None)}`` of everything measured in a result."""
    table = {}
    for row in result["rows"]:
        for what, ms, digest in measured(row):
            # a report in place of a name (diffusers_step's attention) names no row
            names = (value if isinstance(value := row.get(name), str | int) else None for name in KEY)
            table[(*names, what)] = ms, digest
    return table


def compare(a, b):
    """[(key text, ms of a, ms of b, a / b, same bytes)] for what both results measured; None where a kind has no time or no hash."""
    mine, theirs = keyed(a), keyed(b)
    table = []
    for key in [key for key in mine if key in theirs]:
        (before, one), (after, other) = mine[key], theirs[key]
        ratio = before / after if before is not None and after else None
        same = None if one is None or other is None else one == other
        table.append((" ".join(str(part) for part in key if part is not None), before, after, ratio, same))
    return table


def line(text, before, after, ratio, same):
    parts = [] if ratio is None else [f"{before:.3f} ms | {after:.3f} ms | ratio {ratio:.4f}"]
    parts += [] if same is None else [f"same bytes {same}"]
    return f"{text}: {' | '.join(parts)}"


def result_of(path):
    """The result in the file ``path``. Raises ValueError when there is none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a result file of run.py bench") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): name a result file of run.py bench") from None
    if not isinstance(result, dict) or not {"kind", "environment", "speed_valid", "rows"} <= set(result):
        raise ValueError(f"{path} holds no result of run.py bench")
    return result


def main(argv):
    parser = command_line.parser("compare", __doc__)
    for name in ("a", "b"):
        parser.add_argument(name, type=command_line.saying(result_of), metavar=f"{name.upper()}.json", help="a result file")
    chosen = parser.parse_args(argv)
    a, b = chosen.a, chosen.b
    for name in sorted(set(a["environment"]) | set(b["environment"])):
        if a["environment"].get(name) != b["environment"].get(name):
            print(f"{name}: {a['environment'].get(name)} | {b['environment'].get(name)}")
    if not (a["speed_valid"] and b["speed_valid"]):
        print("these times say nothing about speed: at least one file is a harness check on a CPU")
    table = compare(a, b)
    if not table:
        print("the files have no row in common")
        return 1
    for row in table:
        print(line(*row))
    return 0

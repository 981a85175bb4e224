"""Two result files side by side: the same rows' times, their ratio, and whether the bytes are the same."""

import argparse
import json
from pathlib import Path

KEY = ("model", "blocks", "weights", "shape", "rows", "attention", "candidate", "op", "backend")


def keyed(result):
    """``{key: row}`` of the rows that have a time; the key is what :data:`KEY` names and the row has."""
    return {tuple(row.get(name) for name in KEY): row for row in result["rows"] if "ms" in row}


def compare(a, b):
    """[(key text, ms of a, ms of b, a / b, same bytes or None)] for the rows that both results have."""
    mine, theirs = keyed(a), keyed(b)
    table = []
    for key in [key for key in mine if key in theirs]:
        before, after = mine[key]["ms"]["median"], theirs[key]["ms"]["median"]
        hashes = mine[key].get("sha256"), theirs[key].get("sha256")
        same = None if None in hashes else hashes[0] == hashes[1]
        table.append((" ".join(str(part) for part in key if part is not None), before, after, before / after, same))
    return table


def main(argv):
    parser = argparse.ArgumentParser(prog="python benchmarks compare", description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    chosen = parser.parse_args(argv)
    a, b = (json.loads(path.read_text(encoding="utf-8")) for path in (chosen.a, chosen.b))
    for name in sorted(set(a["environment"]) | set(b["environment"])):
        if a["environment"].get(name) != b["environment"].get(name):
            print(f"{name}: {a['environment'].get(name)} | {b['environment'].get(name)}")
    if not (a["speed_valid"] and b["speed_valid"]):
        print("these times say nothing about speed: at least one file is a harness check on a CPU")
    table = compare(a, b)
    if not table:
        print("the files have no row in common")
        return 1
    for text, before, after, ratio, same in table:
        print(f"{text}: {before:.3f} ms | {after:.3f} ms | ratio {ratio:.4f} | same bytes {same}")
    return 0

"""``run.py bench registry``: what was tried and what became of it; with a name, one experiment and the figures behind it.

The registry holds no measured number of this project: a figure says which result file, row and field it is read from.
"""

import json
import textwrap

from . import command_line
from ._pack import ROOT

REGISTRY = ROOT / "benchmarks" / "registry.json"
SCHEMA = ROOT / "benchmarks" / "registry.schema.json"
FOLDS = {"max": max, "min": min, "sum": sum}


def load():
    """The registry, as ``registry.schema.json`` describes it."""
    return json.loads(REGISTRY.read_text(encoding="utf-8"))


def _field(row, path):
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def figure(entry, result):
    """The number that a registry figure names in ``result`` (the parsed file ``entry["file"]``).

    Raises ValueError when no row matches, or several do and nothing says how to fold them.
    """
    rows = [row for row in result["rows"] if all(row.get(name) == value for name, value in entry["row"].items())]
    values = [value for value in (_field(row, entry["value"]) for row in rows) if isinstance(value, (int, float))]
    if not values or (len(values) > 1 and "fold" not in entry):
        raise ValueError(f"{entry['what']}: {len(values)} values {entry['value']} in {entry['file']} where {entry['row']}")
    return FOLDS[entry["fold"]](values) if "fold" in entry else values[0]


def read_figure(entry):
    """:func:`figure` of the file that the entry names."""
    return figure(entry, json.loads((ROOT / entry["file"]).read_text(encoding="utf-8")))


def show(experiment):
    """Print one experiment in full."""

    def paragraph(name, text):
        if text:
            print(textwrap.fill(f"{name}: {text}", 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))

    print(f"{experiment['id']} ({experiment['family']}): {experiment['status']}")
    if "source" in experiment:
        paragraph("theirs", f"{experiment['source']['id']} in {experiment['source']['registry']}; not repeated here")
    for name in ("hypothesis", "evidence", "decision"):
        paragraph(name, experiment[name])
    for entry in experiment["figures"]:
        print(f"  {entry['what']}: {read_figure(entry):.4g}  ({entry['file']})")
    for name in ("missing", "code", "results"):
        paragraph(name, ", ".join(experiment[name]))
    paragraph("used here", experiment.get("used_here"))
    for command in experiment["reproducer"]:
        print(f"again: {command}")


def main(argv):
    statuses = json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"]["experiment"]["properties"]["status"]["enum"]
    parser = command_line.parser("registry", __doc__)
    parser.add_argument("id", nargs="?", help="one experiment in full")
    parser.add_argument("--status", choices=statuses, help="only those with this status")
    parser.add_argument("--origin", choices=["own", "founding"], help="only this project's, or those it was founded on")
    parser.add_argument("--quoted", action="store_true", help="what others published; nothing of it was measured here")
    chosen = parser.parse_args(argv)
    registry = load()
    if chosen.quoted:
        for row in registry["quoted"]:
            print(f"{row['who']}: {row['what']}: {row['figure']} ({row['hardware'] or 'no hardware named'}; {row['source']})")
        return 0
    experiments = {experiment["id"]: experiment for experiment in registry["experiments"]}
    if chosen.id is not None:
        if chosen.id not in experiments:
            parser.error(f"no experiment {chosen.id!r}; there are {', '.join(experiments)}")
        show(experiments[chosen.id])
        return 0
    for experiment in experiments.values():
        if chosen.status in (None, experiment["status"]) and chosen.origin in (None, experiment["origin"]):
            print(f"{experiment['status']:<21} {experiment['id']:<48} {experiment['hypothesis']}")
    return 0

"""The table of public reports: all 66 are in it, and every test that it names exists."""

import ast
import re

from h3_vortex.tests.conftest import ROOT

TABLE = ROOT / "tests" / "reports" / "README.md"
# The reports as they were collected; numbers between them belong to nothing.
REPORTS = {
    *(1, 2, 3, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22),
    *(23, 25, 26, 29, 30, 31, 32, 33, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44),
    *(45, 47, 48, 51, 53, 54),
    *(55, 56, 58, 59, 61, 62, 63, 65, 67, 68, 69, 70, 71, 72, 73, 74, 76),
    *(77, 78, 79, 81, 83, 88, 90),
}  # fmt: skip
NAME = re.compile(r"`((?:unit|host|gpu|blackwell|reports)/test_\w+\.py)::(test_\w+)`")


def rows():
    """``{number: (what happened, how it is covered)}``."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and re.fullmatch(r"\[\d+\]\(https://\S+\)", cells[0]):
            number = int(cells[0][1 : cells[0].index("]")])
            assert number not in found, f"report {number} is listed twice"
            found[number] = cells[1:]
    return found


def defined(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_all_reports_are_in_the_table():
    assert len(REPORTS) == 66 and set(rows()) == REPORTS


def test_every_named_test_exists():
    known = {}
    for number, (_, cover) in rows().items():
        for file, name in NAME.findall(cover):
            path = ROOT / "tests" / file
            assert path.is_file(), f"report {number} names {file}"
            known.setdefault(path, defined(path))
            assert name in known[path], f"report {number} names {file}::{name}"


def test_every_report_is_covered_or_says_why_not():
    for number, (_, cover) in rows().items():
        assert NAME.search(cover), f"report {number} names no test"
        rest = NAME.sub("", cover)
        assert "`unit/" not in rest and "`host/" not in rest, f"report {number}: a test is written in another form"


def test_every_test_named_by_a_report_is_in_its_row():
    """``test_report_7_...`` and ``test_reports_7_8_9_...`` anywhere in the tests."""
    table = rows()
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        for name in defined(path):
            match = re.match(r"test_reports?((?:_\d+)+)_", name)
            for number in map(int, match[1].strip("_").split("_")) if match else ():
                assert (f"{path.parent.name}/{path.name}", name) in NAME.findall(table[number][1]), (
                    f"{path.name}::{name} and report {number}"
                )

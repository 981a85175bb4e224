"""The README's measured tables are what the result files say, and nothing else."""

import pytest
from h3_vortex.benchmarks import tables


def test_the_readme_holds_what_the_result_files_say():
    text = tables.README.read_text(encoding="utf-8")
    assert {match[2] for match in tables.BLOCK.finditer(text)} == set(tables.TABLES)
    assert tables.filled(text) == text, "run: python run.py bench tables"


@pytest.mark.parametrize("name", tables.TABLES)
def test_no_table_is_empty(name):
    assert tables.TABLES[name]().count("\n|") > 3


def test_no_result_with_differing_bytes_is_called_exact():
    for result in tables.STEPS:
        for row in tables.load(result)["rows"]:
            if row["candidate"] == "exact":
                assert row["equal_to_stock"] and row["repeatable"] and row["dispatch"]["stock"] == 0

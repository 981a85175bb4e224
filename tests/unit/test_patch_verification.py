"""Verdicts: what counts as the same bytes, what is remembered, what is said."""

import math

import pytest
import torch
from h3_vortex.kernels.patch import verification
from h3_vortex.kernels.patch.verification import Verdict, activations, difference, known, segments, settle

FILE = "test.json"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())
    return tmp_path


def forget(monkeypatch):
    """A new process: only the disk remembers."""
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())


def equal_pair():
    return [torch.arange(4)], [torch.arange(4)]


def unequal_pair():
    return [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 2.5])]


@pytest.mark.parametrize("a, b, same", [
    (torch.tensor([0.0]), torch.tensor([-0.0]), False),
    (torch.tensor([math.nan]), torch.tensor([math.nan]), True),
    (torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16), torch.tensor([math.nan], dtype=torch.bfloat16), True),
    (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan]), False),
    (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 2.0]), False),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), False),
    (torch.zeros(2, 3), torch.zeros(3, 2), False),
    (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
    (torch.tensor(1, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8), True),
    (torch.zeros(0, 4), torch.zeros(0, 4), True),
])
def test_difference_is_about_bytes(a, b, same):
    assert (difference([a], [b]) is None) == same


def test_difference_counts():
    assert difference(*unequal_pair()) == "result 0 differs from stock in 1 of 8 bytes"
    with pytest.raises(ValueError):
        difference([], [torch.zeros(1)])


def test_an_equal_verdict_is_found_once_and_remembered(monkeypatch):
    calls = []

    def compare():
        calls.append(1)
        return equal_pair()

    assert known("case", FILE) is None
    assert settle("case", FILE, compare).equal and settle("case", FILE, compare).equal
    assert len(calls) == 1
    forget(monkeypatch)
    verdict = settle("case", FILE, compare)
    assert verdict.equal and verdict.note.endswith("(remembered)") and len(calls) == 1
    assert known("case", "other-environment.json") is None


def test_a_difference_is_said_once_per_process_and_remembered(monkeypatch, caplog):
    verdict = settle("case", FILE, unequal_pair)
    assert not verdict.equal
    settle("case", FILE, unequal_pair)
    assert len(caplog.records) == 1 and "switched off, stock runs instead" in caplog.text
    forget(monkeypatch)
    caplog.clear()
    assert not known("case", FILE).equal and not known("case", FILE).equal
    assert len(caplog.records) == 1


def test_what_could_not_run_is_off_now_and_tried_again_by_the_next_process(monkeypatch, caplog):
    def broken():
        raise RuntimeError("no kernel image\nwith a second line")

    verdict = settle("case", FILE, broken)
    assert not verdict.equal and verdict.note == "could not be run: RuntimeError: no kernel image"
    assert not settle("case", FILE, equal_pair).equal
    forget(monkeypatch)
    assert known("case", FILE) is None
    assert settle("case", FILE, equal_pair).equal


def test_other_errors_are_not_swallowed():
    def broken():
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        settle("case", FILE, broken)


def test_times_are_measured_only_when_asked_and_equal():
    assert settle("a", FILE, equal_pair).ms is None
    assert settle("a", FILE, equal_pair, lambda: (2.0, 1.0)).ms == (2.0, 1.0)
    assert verification.timings() == {"a": {"rows": verification.TIMED_ROWS, "stock_ms": 2.0, "kernel_ms": 1.0}}
    assert settle("b", FILE, unequal_pair, lambda: pytest.fail("timed a wrong op")).ms is None


def test_a_corrupt_file_is_no_verdict(own_cache, monkeypatch):
    settle("case", FILE, equal_pair)
    (path,) = (own_cache / verification.KIND).glob("*.json")
    path.write_bytes(path.read_bytes()[:-3] + b"???")
    forget(monkeypatch)
    assert known("case", FILE) is None


def test_the_environment_separates_hosts_and_devices():
    cpu = torch.device("cpu")
    assert verification.environment(cpu, "a") == verification.environment(cpu, "a") != verification.environment(cpu, "b")


def test_a_verdict_of_one_host_is_none_of_another():
    assert settle("case", "one.json", equal_pair).equal
    assert known("case", "other.json") is None
    assert not settle("case", "other.json", unequal_pair).equal and known("case", "one.json").equal
    assert verification.summary()["case"]["equal"] is False, "what one host refuses is shown"


@pytest.mark.parametrize("package", verification.PACKAGES)
def test_another_version_of_a_kernel_package_is_another_environment(package, monkeypatch):
    cpu, installed = torch.device("cpu"), verification.cache.version
    before = verification.environment.__wrapped__(cpu, "host")
    monkeypatch.setattr(verification.cache, "version", lambda name: "0.0.test" if name == package else installed(name))
    assert verification.environment.__wrapped__(cpu, "host") != before


def test_summary_is_plain_data():
    import json

    settle("case", FILE, equal_pair)
    assert json.loads(json.dumps(verification.summary()))["case"]["equal"] is True
    assert Verdict(True, "x").ms is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_hold_the_rows_that_break_kernels(dtype):
    calm = activations(371, 256, dtype, torch.device("cpu"), 0, poison=False)
    assert calm.dtype == dtype and calm.shape == (371, 256) and bool(calm.isfinite().all())
    zero_rows = calm[(calm == 0).all(dim=1)]
    assert zero_rows.shape[0] >= 4 and bool(torch.signbit(zero_rows.float()).any()) and not bool(torch.signbit(zero_rows.float()).all())
    assert calm.float().abs().max() > 300 and (calm.float().abs()[calm != 0]).min() < 1e-6
    wild = activations(371, 256, dtype, torch.device("cpu"), 0, poison=True)
    assert bool(wild.isnan().any()) and bool(wild.isinf().any())
    assert torch.equal(calm, activations(371, 256, dtype, torch.device("cpu"), 0, poison=False)), "the seed decides"
    many = activations(1000, 8, dtype, torch.device("cpu"), 0, poison=False)
    assert torch.equal(many[:371], many[371:742])


@pytest.mark.parametrize("rows", [1, 2, 7, 371])
def test_segments_cover_the_rows(rows):
    from h3_vortex.kernels.segments import row_map

    runs = segments(rows, 6, 0)
    assert row_map(runs, rows, "cpu").shape == (rows,)
    assert any(a == b for a, b, _ in runs) and all(0 <= row < 6 for _, _, row in runs)

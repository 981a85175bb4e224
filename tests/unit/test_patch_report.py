"""Counts, the log line of a run, and what the status route may say."""

import gc
import json
import logging
import threading
import weakref

import pytest
import torch
from h3_vortex.kernels.patch import report, verification
from h3_vortex.kernels.patch.report import Calls, Session, status, timed_run


def calls(fused=(), stock=()):
    made = Calls()
    for key in fused:
        made.fused[key] += 1
    for key in stock:
        made.stock[key] += 1
    return made


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    monkeypatch.setattr(report, "_process", {"warm": False, "runs": 0, "complete_runs": 0, "last_run": None})


def test_table_by_op():
    made = calls([("gate", "cuda"), ("gate", "cuda"), ("gate", "triton")], [("gate", "training"), ("swiglu", "switched off")])
    assert made.table() == {
        "gate": {"fused": {"cuda": 2, "triton": 1}, "stock": {"training": 1}},
        "swiglu": {"fused": {}, "stock": {"switched off": 1}}}


def test_a_run_has_its_own_counts(caplog):
    caplog.set_level(logging.INFO, "h3_vortex")
    session = Session("exact", "stock (exact)")
    for _ in range(2):
        with timed_run(session):
            session.finish_call(calls([("gate", "cuda")]), rows=78)
    told = session.report()
    assert told["ops"]["gate"]["fused"] == {"cuda": 2} and told["last_run_ops"]["gate"]["fused"] == {"cuda": 1}
    assert told["model_calls"] == 2 and told["packed_rows"] == 78
    lines = [r.message for r in caplog.records]
    assert len(lines) == 2 and "complete run, 1 model calls of 78 rows" in lines[0] and "1 fused calls, 0 stock calls" in lines[0]


def test_an_interrupted_run_is_said_to_be_one(caplog):
    caplog.set_level(logging.INFO, "h3_vortex")
    session = Session("exact", "stock (exact)")
    with pytest.raises(KeyboardInterrupt), timed_run(session):
        raise KeyboardInterrupt
    assert "interrupted run" in caplog.text
    assert status()["last_run"]["complete"] is False and status()["ready"] is False


def test_ready_after_a_complete_run_and_stays():
    session = Session("exact", "stock (exact)")
    assert status()["ready"] is False
    with timed_run(session):
        pass
    with pytest.raises(RuntimeError), timed_run(session):
        raise RuntimeError
    assert status()["ready"] is True and status()["runs"] == 2 and status()["warm"] is False


def test_ready_after_warmup():
    report.mark_warm()
    assert status()["ready"] is True and status()["warm"] is True


def test_status_forgets_models_that_are_gone():
    gc.collect()
    session = Session("exact", "stock (exact)")
    before = len(status()["models"])
    del session
    gc.collect()
    assert len(status()["models"]) == before - 1


def test_step_aside_is_said_once(caplog):
    session = Session("exact", "stock (exact)")
    for _ in range(3):
        session.step_aside("H3 Vortex: because")
    assert len(caplog.records) == 1 and session.report()["stepped_aside"] == "H3 Vortex: because"


def test_counts_of_several_threads_add_up():
    session = Session("exact", "stock (exact)")
    threads = [threading.Thread(target=lambda: [session.finish_call(calls([("gate", "cuda")]), 1) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.report()["ops"]["gate"]["fused"]["cuda"] == session.report()["model_calls"] == 200


def test_everything_is_json():
    session = Session("exact", "stock (exact)")
    json.dumps([session.report(), status()])
    assert report.pack_version().count(".") == 2


def test_a_glance_at_a_run():
    session = Session("exact", "stock (exact)")
    with timed_run(session):
        session.attention = {"backend": "sdpa", "class": "E0"}
        session.finish_call(calls([("gate", "cuda"), ("swiglu", "cuda")], [("nvfp4", "a LoRA acts on the weight in each call")]), rows=78)
    state = session.report() | {"verification": {"gate bf16": {"equal": True}, "swiglu bf16": {"equal": False}}}
    assert report.glance(state).splitlines() == [
        "2 fused calls (cuda), 1 stock calls",
        "  stock: 1 x a LoRA acts on the weight in each call",
        "verified: 1 of 2 checks gave stock's bytes",
        "  OFF: swiglu bf16",
        "attention: sdpa (E0), chosen: stock (exact)"]
    session.step_aside("H3 Vortex: no kernel for cpu")
    assert report.glance(session.report()) == "ran as stock: no kernel for cpu"


def test_the_status_answers_while_a_case_is_verified(monkeypatch, tmp_path):
    """ComfyUI's event loop answers it: waiting for a compilation would freeze the whole interface."""
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    begun, may_end, answered = threading.Event(), threading.Event(), threading.Event()

    def compare():
        begun.set()
        assert may_end.wait(30)
        return [], []

    session = Session("exact", "stock (exact)")

    def ask():
        status()
        session.report()
        answered.set()

    verifying = threading.Thread(target=verification.settle, args=("slow case", "slow.json", compare))
    asking = threading.Thread(target=ask)
    verifying.start()
    try:
        assert begun.wait(30)
        asking.start()
        assert answered.wait(10)
    finally:
        may_end.set()
        verifying.join()
        asking.join()


SLOWER = "where the transfer takes longer than the arithmetic it decides the speed, not the kernels"


class Patcher:
    """Enough of a ModelPatcher to say where its weights are."""

    def __init__(self, resident, size, device="cuda:0"):
        self.resident, self.size, self.load_device = resident, size, torch.device(device)

    def loaded_size(self):
        return self.resident

    def model_size(self):
        return self.size


@pytest.mark.parametrize("resident, line", [
    (6_100_000_000, f"weights are streamed: 6.1 of 20.0 GB resident; {SLOWER}"),
    (0, f"weights are streamed: 0.0 of 20.0 GB resident; {SLOWER}"),
    (19_900_000_000, "weights: 19.9 of 20.0 GB resident"),
    (20_030_000_000, "weights: 20.0 of 20.0 GB resident")])
def test_reports_33_36_90_streamed_weights_are_said_to_be(resident, line, caplog):
    caplog.set_level(logging.INFO, "h3_vortex")
    session, patcher = Session("exact", "stock (exact)"), Patcher(0, 20_000_000_000)
    with timed_run(session, patcher):
        patcher.resident = resident
        session.finish_call(calls([("gate", "cuda")]), rows=78)
        patcher.resident = 0  # the run's weights leave at its end
    told = session.report()
    assert told["weights"] == {"resident_bytes": min(resident, 20_000_000_000), "bytes": 20_000_000_000} == status()["last_run"]["weights"]
    assert report.glance(told).splitlines()[-1] == line and caplog.records[-1].message.endswith(f"; {line}")
    session.step_aside("H3 Vortex: because")
    assert report.glance(session.report()).splitlines() == ["ran as stock: because", line]


@pytest.mark.parametrize("patcher", [Patcher(1, 2, "cpu"), object(), None])
def test_nothing_is_said_of_weights_where_nothing_is_known(patcher):
    assert report.residency(patcher) is None


def test_the_patcher_of_a_run_is_not_kept():
    session, patcher = Session("exact", "stock (exact)"), Patcher(1, 2)
    with timed_run(session, patcher):
        session.finish_call(calls(), rows=1)
    seen = weakref.ref(patcher)
    del patcher
    gc.collect()
    assert seen() is None and session.report()["weights"] == {"resident_bytes": 1, "bytes": 2}
    with timed_run(session):
        session.finish_call(calls(), rows=1)
    assert session.report()["weights"] is None

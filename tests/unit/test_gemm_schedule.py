"""The search's decisions, with a stand-in for cuBLASLt: what is exact, what is faster, what is cached."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels import cache, gemm_schedule
from h3_vortex.kernels.cublaslt import Config, CublasLtError, Problem

PROBLEM = Problem("bf16", 4, 8, 16)


def config(identity):
    return Config(identity, 1, 1, 0, 0, 0, 1, 0, 0)


class FakeMatmul:
    """Algorithm ids: 1 exact, 2 one bit off, 3 refused at launch, 4 leaves the output unwritten, 5 exact."""

    supported = True

    def __init__(self, problem, device):
        self.problem = problem

    def heuristics(self, workspace):
        if not self.supported:
            raise CublasLtError(f"heuristic for {self.problem}", 15)
        return [SimpleNamespace(config=config(i), workspace=0) for i in (1, 2, 3, 4, 5)]

    def capability(self, identity, what):
        return [1]

    def build(self, wanted):
        if wanted.id > 5 or wanted.swizzle:
            raise CublasLtError("check", 15)
        return SimpleNamespace(config=wanted, workspace=0)

    def run(self, algorithm, x, w, out, workspace=None, x_scale=None, w_scale=None, alpha=None):
        identity = algorithm.config.id
        if identity == 3:
            raise CublasLtError("matmul", 7)
        if identity != 4:
            out.copy_(x @ w.T)
        if identity == 2:
            out.view(torch.int16)[0, 0] ^= 1
        return out


@pytest.fixture
def faked(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(gemm_schedule, "Matmul", FakeMatmul)
    monkeypatch.setattr(gemm_schedule, "unavailable_reason", lambda: None)
    monkeypatch.setattr(gemm_schedule, "version", lambda: 130100)
    monkeypatch.setattr(
        gemm_schedule.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="fake", multi_processor_count=1))
    monkeypatch.setattr(FakeMatmul, "supported", True)
    times = {"stock": 10.0, 1: 8.0, 5: 9.0}

    def timed(functions, rounds, device):
        if len(functions) == 1:
            return [[1.0] * rounds]
        return [[times["stock"]] * rounds, [times[1]] * rounds, [times[5]] * rounds]

    monkeypatch.setattr(gemm_schedule, "_timed", timed)
    return times


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return gemm_schedule.Operands(
        torch.randn(4, 16, generator=generator).bfloat16(), torch.randn(8, 16, generator=generator).bfloat16())


def stock(operands):
    return operands.x @ operands.w.T


def test_only_exact_schedules_survive_and_the_fastest_wins(faked):
    outcome = gemm_schedule.search(PROBLEM, [data(0), data(1)], stock)
    verdicts = {c.config.id: c.verdict for c in outcome.candidates}
    assert verdicts[1] == verdicts[5] == "exact" and verdicts[2] == verdicts[4] == "differs"
    assert verdicts[3].startswith("refused")
    assert outcome.config == config(1) and "1.250x" in outcome.reason


def test_a_schedule_that_is_not_faster_is_not_chosen(faked):
    faked[1] = faked[5] = 9.95
    outcome = gemm_schedule.search(PROBLEM, [data()], stock)
    assert outcome.config is None and "no exact schedule beats stock" in outcome.reason


def test_an_unsupported_problem_says_so(faked, monkeypatch):
    monkeypatch.setattr(FakeMatmul, "supported", False)
    outcome = gemm_schedule.search(Problem("nvfp4", 4, 8, 16), [data()], stock)
    assert outcome.config is None and "NOT_SUPPORTED" in outcome.reason


def test_no_time_tries_nothing(faked):
    outcome = gemm_schedule.search(PROBLEM, [data()], stock, seconds=-1.0)
    assert outcome.config is None and all(c.verdict == "not tried" for c in outcome.candidates)


def prepared(monkeypatch, **options):
    schedules = gemm_schedule.Schedules()
    return schedules, schedules.prepare("fc2", PROBLEM, [data()], stock, **options)


def test_prepare_caches_verifies_and_runs(faked, monkeypatch):
    schedules, outcome = prepared(monkeypatch)
    assert schedules.has("fc2", PROBLEM, torch.device("cpu")) and outcome.config == config(1)
    assert torch.equal(schedules.run("fc2", PROBLEM, data(3), torch.bfloat16), stock(data(3)))
    monkeypatch.setattr(gemm_schedule, "search", lambda *a, **k: pytest.fail("the cached schedule was searched again"))
    again, outcome = prepared(monkeypatch)
    assert "cached, verified" in outcome.reason and again.has("fc2", PROBLEM, torch.device("cpu"))


def test_a_cached_schedule_that_changed_its_bytes_is_dropped(faked, monkeypatch, caplog):
    prepared(monkeypatch)
    monkeypatch.setattr(FakeMatmul, "run", lambda self, algorithm, x, w, out, *a, **k: out.zero_())
    _, outcome = prepared(monkeypatch)
    assert outcome.config is None and "no longer gives stock's bytes" in caplog.text


@pytest.mark.parametrize("damage", ["truncate", "garbage", "foreign config", "other version", "empty"])
def test_a_damaged_cache_file_is_searched_again(faked, monkeypatch, tmp_path, damage):
    prepared(monkeypatch)
    (file,) = (tmp_path / "gemm").iterdir()
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-3])
    elif damage == "garbage":
        file.write_bytes(os.urandom(200))
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "foreign config":
        cache.write_json("gemm", file.name, gemm_schedule.CACHE_VERSION, {"config": {"nonsense": 1}})
    else:
        body = json.loads(cache.read_bytes("gemm", file.name))
        cache.write_json("gemm", file.name, gemm_schedule.CACHE_VERSION + 1, body["data"])
    _, outcome = prepared(monkeypatch)
    assert outcome.config == config(1) and "cached" not in outcome.reason


def test_the_known_schedule_is_tried_before_the_time_is_used_up(faked, monkeypatch):
    """Tens of guesses of a large problem's heuristic do not fit in a second."""
    monkeypatch.setitem(gemm_schedule.KNOWN, PROBLEM.kind, config(5))
    pool = gemm_schedule.candidates(FakeMatmul(PROBLEM, torch.device("cpu")), [("extra", config(4))])
    assert [(origin, a.config.id) for origin, a in pool[:3]] == [("extra", 4), ("known", 5), ("heuristic", 1)]
    assert len({a.config for _, a in pool}) == len(pool) == 5


def test_another_kitchen_or_another_pack_is_searched_anew(faked, monkeypatch):
    """Stock is comfy-kitchen's GEMM: that nothing beat it holds for the one that was measured."""
    faked[1] = faked[5] = 9.95
    prepared(monkeypatch)
    faked[1] = 8.0
    _, outcome = prepared(monkeypatch)
    assert outcome.config is None and "cached" in outcome.reason
    for name, value in (("version", "9.9"), ("sources", "another version of this pack")):
        with monkeypatch.context() as changed:
            changed.setattr(cache, name, lambda *_, value=value: value)
            assert prepared(monkeypatch)[1].config == config(1)


@pytest.mark.parametrize(("status", "remembered"), [(15, True), (3, False), (1, False), (14, False)])
def test_only_a_refusal_of_the_problem_is_remembered(faked, monkeypatch, tmp_path, status, remembered):
    def refuse(self, workspace):
        raise CublasLtError("heuristic", status)

    with monkeypatch.context() as failing:
        failing.setattr(FakeMatmul, "heuristics", refuse)
        _, outcome = prepared(failing)
        assert outcome.config is None and outcome.passing is not remembered
    assert prepared(monkeypatch)[1].config == (None if remembered else config(1))


def test_a_failure_after_the_search_leaves_no_promise_behind(faked, monkeypatch):
    made = []

    class Failing(FakeMatmul):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)
            if len(made) == 2:
                raise torch.OutOfMemoryError("out of memory for the descriptor's zero")

    monkeypatch.setattr(gemm_schedule, "Matmul", Failing)
    schedules, device = gemm_schedule.Schedules(), torch.device("cpu")
    with pytest.raises(torch.OutOfMemoryError):
        schedules.prepare("fc2", PROBLEM, [data()], stock)
    assert schedules.known("fc2", PROBLEM, device) is None and not schedules.has("fc2", PROBLEM, device)
    assert schedules.prepare("fc2", PROBLEM, [data()], stock).config == config(1)
    assert torch.equal(schedules.run("fc2", PROBLEM, data(3), torch.bfloat16), stock(data(3)))


def test_an_unwritable_cache_keeps_the_result_of_this_run(faked, monkeypatch, tmp_path):
    blocker = tmp_path / "a file, not a folder"
    blocker.write_text("")
    monkeypatch.setenv("H3_VORTEX_CACHE", str(blocker))
    schedules, outcome = prepared(monkeypatch)
    assert outcome.config == config(1) and schedules.has("fc2", PROBLEM, torch.device("cpu"))


def test_no_library_means_stock_with_the_reason(monkeypatch):
    monkeypatch.setattr(gemm_schedule, "unavailable_reason", lambda: "needs an NVIDIA GPU that torch can use")
    schedules, outcome = prepared(monkeypatch)
    assert outcome.config is None and "NVIDIA GPU" in outcome.reason
    assert not schedules.has("fc2", PROBLEM, torch.device("cpu"))

"""cuBLASLt on a real GPU: rebuilt algorithms, exactness of the search, capture, side streams, growth."""

import pytest
import torch
from h3_vortex.benchmarks.gemm import operands, stock_call
from h3_vortex.kernels import cublaslt, gemm_schedule
from h3_vortex.kernels.cublaslt import CublasLtError, Matmul, Problem

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))


def test_nine_values_rebuild_a_heuristic_algorithm_bit_for_bit():
    matmul = Matmul(Problem("bf16", 4096, 5376, 7168), DEVICE)
    found = matmul.heuristics(32 << 20)
    assert found
    for algorithm in found:
        rebuilt = matmul.build(algorithm.config)
        assert bytes(rebuilt.struct) == bytes(algorithm.struct) and rebuilt.workspace == algorithm.workspace
    assert found[0].config.id in matmul.ids()


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("m", [1, 15, 16, 127, 2049])
def test_first_exact_candidate_equals_stock(kind, m):
    n, k = 1536, 1024
    problem = Problem(kind, m, n, k)
    data = [operands(kind, m, n, k, DEVICE, seed) for seed in (0, 1)]
    outcome = gemm_schedule.search(problem, data, stock_call(kind), seconds=2.0)
    assert any(c.verdict == "exact" for c in outcome.candidates), outcome.reason
    if outcome.config is not None:
        schedules = gemm_schedule.Schedules()
        matmul = Matmul(problem, DEVICE)
        schedules._ready["fc2", problem, DEVICE] = (matmul, matmul.build(outcome.config))
        fresh = operands(kind, m, n, k, DEVICE, 7)
        assert gemm_schedule.same_bytes(schedules.run("fc2", problem, fresh, torch.bfloat16), stock_call(kind)(fresh))


def planted(matmul, split_k):
    """A split-K variant of a heuristic algorithm that the library accepts here, or None."""
    from dataclasses import replace

    for algorithm in matmul.heuristics(32 << 20):
        for reduction in (1, 2, 4):
            config = replace(algorithm.config, split_k=split_k, reduction=reduction)
            try:
                built = matmul.build(config)
            except CublasLtError:
                continue
            if built.workspace <= gemm_schedule.WORKSPACES[-1]:
                return config
    return None


def test_a_planted_split_k_schedule_is_rejected_by_its_bytes():
    m, n, k = 256, 1024, 14336
    problem = Problem("bf16", m, n, k)
    matmul = Matmul(problem, DEVICE)
    data = [operands("bf16", m, n, k, DEVICE, 0)]
    stock = stock_call("bf16")
    configs = [c for c in (planted(matmul, s) for s in (2, 3, 4, 5, 7)) if c is not None]
    assert configs, "the library offers no split-K variant for this problem"
    outcome = gemm_schedule.search(problem, data, stock, seconds=5.0, extra=[("planted", c) for c in configs])
    verdicts = {c.config: c.verdict for c in outcome.candidates}
    assert "differs" in [verdicts[c] for c in configs]
    assert outcome.config is None or verdicts[outcome.config] == "exact"


def test_a_planted_slow_schedule_is_not_chosen(monkeypatch):
    m, n, k = 4096, 5376, 7168
    problem = Problem("bf16", m, n, k)
    matmul = Matmul(problem, DEVICE)
    data = [operands("bf16", m, n, k, DEVICE, 0)]
    stock = stock_call("bf16")
    full = gemm_schedule.search(problem, data, stock, seconds=10.0)
    exact = sorted((c for c in full.candidates if c.verdict == "exact"), key=lambda c: c.ms)
    slow = exact[-1]
    assert slow.ms > 1.2 * exact[0].ms, "every exact schedule is equally fast here: nothing slow to plant"
    monkeypatch.setattr(gemm_schedule, "candidates", lambda matmul_, extra=(): [("planted", matmul.build(slow.config))])
    outcome = gemm_schedule.search(problem, data, stock)
    assert outcome.config is None and "no exact schedule beats stock" in outcome.reason


def test_capture_and_side_stream():
    m, n, k = 777, 1536, 1024
    problem = Problem("bf16", m, n, k)
    matmul = Matmul(problem, DEVICE)
    algorithm = next(a for a in matmul.heuristics(0))
    data = operands("bf16", m, n, k, DEVICE, 0)
    expected = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    matmul.run(algorithm, data.x, data.w, expected)
    x, out = data.x.clone(), torch.zeros_like(expected)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(data.x + 1)
        matmul.run(algorithm, x, data.w, out)
    side.synchronize()
    shifted = matmul.run(algorithm, data.x + 1, data.w, torch.empty_like(out))
    assert gemm_schedule.same_bytes(out, shifted)
    x.copy_(data.x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul.run(algorithm, x, data.w, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert gemm_schedule.same_bytes(out, expected)


def test_a_thousand_calls_allocate_nothing_that_stays():
    m, n, k = 777, 1536, 1024
    problem = Problem("bf16", m, n, k)
    data = [operands("bf16", m, n, k, DEVICE, 0)]
    schedules = gemm_schedule.Schedules()
    matmul = Matmul(problem, DEVICE)
    schedules._ready["fc2", problem, DEVICE] = (matmul, matmul.heuristics(32 << 20)[0])
    schedules.run("fc2", problem, data[0], torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        schedules.run("fc2", problem, data[0], torch.bfloat16)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_too_small_a_workspace_is_refused_before_the_launch():
    matmul = Matmul(Problem("bf16", 64, 512, 14336), DEVICE)
    needy = [a for a in matmul.heuristics(32 << 20) if a.workspace]
    if not needy:
        needy = [a for a in (matmul.build(c) for c in [planted(matmul, 4)] if c) if a.workspace]
    assert needy, "no algorithm with a workspace for this problem"
    data = operands("bf16", 64, 512, 14336, DEVICE, 0)
    with pytest.raises(ValueError, match="bytes of workspace"):
        matmul.run(needy[0], data.x, data.w, torch.empty(64, 512, dtype=torch.bfloat16, device=DEVICE))


def test_nvfp4_before_blackwell_is_refused_with_a_reason():
    if torch.cuda.get_device_capability(DEVICE) >= (10, 0):
        pytest.skip("this GPU has FP4 tensor cores: see tests/blackwell")
    problem = Problem("nvfp4", 256, 1024, 1024)
    Matmul(problem, DEVICE)  # the descriptors themselves build
    data = [operands("nvfp4", 256, 1024, 1024, DEVICE, 0)]
    outcome = gemm_schedule.search(problem, data, lambda d: pytest.fail("stock was run although no schedule exists"))
    assert outcome.config is None and "NOT_SUPPORTED" in outcome.reason
    schedules = gemm_schedule.Schedules()
    assert schedules.prepare("fc2", problem, data, lambda d: None).config is None
    assert not schedules.has("fc2", problem, DEVICE)


def test_cached_schedule_is_verified_and_used():
    m, n, k = 2048, 5376, 14336
    problem = Problem("bf16", m, n, k)
    data = [operands("bf16", m, n, k, DEVICE, 0)]
    first = gemm_schedule.Schedules().prepare("fc2", problem, data, stock_call("bf16"))
    second = gemm_schedule.Schedules().prepare("fc2", problem, data, stock_call("bf16"))
    assert second.config == first.config and "cached" in second.reason
    assert cublaslt.version() > 120_000

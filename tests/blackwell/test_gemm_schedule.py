"""NVFP4 schedules where FP4 tensor cores exist (SM100, 103, 120, 121)."""

import pytest
import torch
from h3_vortex.benchmarks.gemm import operands, stock_call
from h3_vortex.kernels import gemm_schedule
from h3_vortex.kernels.cublaslt import Problem

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("m", [16, 15_504, 37_824])
def test_fc2_search_keeps_stock_bytes(m, monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    problem = Problem("nvfp4", m, 5376, 14336)
    data = [operands("nvfp4", m, 5376, 14336, DEVICE, seed) for seed in (0, 1)]
    stock = stock_call("nvfp4")
    schedules = gemm_schedule.Schedules()
    outcome = schedules.prepare("fc2", problem, data, stock, seconds=5.0)
    assert outcome.reason
    if schedules.has("fc2", problem, DEVICE):
        fresh = operands("nvfp4", m, 5376, 14336, DEVICE, 9)
        assert gemm_schedule.same_bytes(schedules.run("fc2", problem, fresh, torch.bfloat16), stock(fresh))

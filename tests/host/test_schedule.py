"""Where the runner uses a cuBLASLt schedule for NVFP4 projections, and that it asks for one outside the run's recorded allocations."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels import gemm_schedule
from h3_vortex.kernels.patch import scheduled
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host import w4a4
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock

EAGER = Features(allow_eager=True)


class FakeSchedules:
    """Accepts every second problem; multiplies as the stock GEMM of these tests does."""

    def __init__(self, pauses):
        self.outcomes, self.asked, self.ran, self.pauses = {}, [], [], pauses

    def known(self, layer, problem, device):
        return self.outcomes.get(problem)

    def prepare(self, layer, problem, data, stock_call):
        assert self.pauses.depth == 1, "a search must not be recorded by the host's compiler"
        first, second = (stock_call(d) for d in data)
        assert first.shape == (problem.m, problem.n) and not torch.equal(first, second)
        self.asked.append(problem)
        accepted = len(self.asked) % 2 == 1
        self.outcomes[problem] = SimpleNamespace(config="fixed" if accepted else None, reason="planted")
        return self.outcomes[problem]

    def run(self, layer, problem, data, dtype):
        self.ran.append(problem)
        left, right = self.scales  # alpha is their product, which the reference GEMM would round elsewhere
        assert torch.equal(data.alpha, (left * right).reshape(1))
        return w4a4.scaled_mm_nvfp4(data.x, data.w, left, right, data.x_scale, data.w_scale, out_dtype=dtype)


@pytest.fixture
def model(comfy, tiny_models):
    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("the reference GEMM is for the CPU: set H3_HOST_DEVICE=cpu")
    w4a4.register()
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_nvfp4"]))
    with w4a4.native(patcher.model.diffusion_model):
        yield patcher
    comfy.model_management.unload_all_models()


@pytest.fixture
def schedules(monkeypatch):
    from h3_vortex.kernels.patch import core

    pauses = SimpleNamespace(depth=0)
    pause = core.Core.pause

    @contextlib.contextmanager
    def counted(self):
        pauses.depth += 1
        with pause(self):
            yield
        pauses.depth -= 1

    fake = FakeSchedules(pauses)
    operands = scheduled.operands

    def noted(h, weight):
        fake.scales = h._params.scale, weight._params.scale
        return operands(h, weight)

    monkeypatch.setattr(scheduled, "operands", noted)
    monkeypatch.setattr(core.Core, "pause", counted)
    monkeypatch.setattr(scheduled, "SCHEDULES", fake)
    monkeypatch.setattr(gemm_schedule, "unavailable_reason", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # a CPU model computes in fp32; the schedule's output type is what the host's is
    monkeypatch.setattr(scheduled, "OUTPUTS", {torch.float32: "bf16", torch.bfloat16: "bf16"})
    return fake


def accelerated(patcher, features=EAGER):
    from h3_vortex.kernels.patch.comfyui import accelerate

    return accelerate(patcher, features)


def report(patcher):
    from h3_vortex.kernels.patch import comfyui

    return comfyui.report(patcher)


def test_accepted_schedules_run_and_the_others_leave_stock(model, schedules):
    expected = sample(model, conditioning("text"))
    patched = accelerated(model)
    assert same(sample(patched, conditioning("text")), expected)
    told, blocks = report(patched), len(model.model.diffusion_model.blocks)
    assert len(schedules.asked) == 4, "qkv, out, fc1 and fc2 are four shapes, asked once each"
    assert len(schedules.ran) == fused(told, "gemm_schedule") == 2 * 4 * blocks
    assert stock(told, "gemm_schedule") == {"planted": 2 * 4 * blocks}


def test_switched_off_nothing_is_asked(model, schedules):
    patched = accelerated(model, Features(allow_eager=True, schedule=False))
    assert same(sample(patched, conditioning("text"), steps=1), sample(model, conditioning("text"), steps=1))
    assert schedules.asked == [] and "gemm_schedule" not in report(patched)["ops"]


def test_without_the_library_the_report_says_why(model):
    patched = accelerated(model)
    sample(patched, conditioning("text"), steps=1)
    (reason,) = stock(report(patched), "gemm_schedule")
    assert "NVIDIA GPU" in reason

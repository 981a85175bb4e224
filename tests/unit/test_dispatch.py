"""Choice of backend: order, reasons, explicit choice, plans, what is remembered, what is switched off."""

import threading

import pytest
import torch
from h3_vortex.kernels import dispatch
from h3_vortex.kernels.dispatch import BackendUnavailable, Constraints, Op, Planned, Rule, use_backend

CPU = frozenset({"cpu"})


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(Op, "registry", {})
    calls = []
    made = Op("sample", lambda x, y: calls.append("eager") or x, ("x", "y"))
    made.calls = calls
    return made


def add(op, name, constraints=None, plan=None):
    if plan is None:
        op.add_backend(name, lambda x, y: op.calls.append(name) or x, constraints or Constraints(CPU))
    else:
        op.add_backend(name, Planned(plan), constraints or Constraints(CPU))


X = torch.zeros(4, 8)


def test_the_reference_is_the_last_resort(op):
    op(X, 1)
    assert op.calls == ["eager"] and op.reasons(X, 1) == {"eager": None}


def test_order_is_cuda_triton_eager(op):
    add(op, "triton")
    op(X, 1)
    add(op, "cuda")
    op(X, 1)
    assert op.calls == ["triton", "cuda"]


def test_unknown_backend_names(op):
    with pytest.raises(ValueError, match="'fast' is not one of cuda, triton, eager"):
        op.add_backend("fast", lambda x, y: x, Constraints(CPU))
    with use_backend("cuda"), pytest.raises(BackendUnavailable, match="sample: backend cuda does not exist for this op"):
        op(X, 1)


@pytest.mark.parametrize("constraints, words", [
    (Constraints(CPU, available=lambda: "needs a driver"), "needs a driver"),
    (Constraints(frozenset({"cuda"})), "needs cuda tensors, x is on cpu"),
    (Constraints(CPU, {"x": frozenset({torch.bfloat16, torch.float16})}), "needs x in bfloat16 or float16, got float32"),
    (Constraints(CPU, rules=(Rule("four dimensions", lambda a: a["x"].dim() == 4),)), "needs four dimensions"),
])  # fmt: skip
def test_each_constraint_has_words(op, constraints, words):
    add(op, "cuda", constraints)
    assert op.reasons(X, 1) == {"cuda": words, "eager": None} and op.reason("cuda", X, 1) == words
    assert op.choose(X, 1) == "eager"
    with use_backend("cuda"), pytest.raises(BackendUnavailable) as error:
        op(X, 1)
    assert str(error.value) == f"sample: backend cuda {words}"


def test_tensors_on_two_devices(op):
    add(op, "cuda", Constraints(frozenset({"cpu", "meta"})))
    assert op.reason("cuda", X, torch.zeros(1, device="meta")) == "needs all tensors on one device, y is on meta and x on cpu"


def test_capability(op, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    add(op, "cuda", Constraints(CPU, min_capability=(8, 0)))
    assert op.reason("cuda", X, 1) == "needs compute capability 8.0, got 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert op.reason("cuda", X, 1) is None


def test_a_choice_is_made_once_per_kind_of_call(op):
    asked = []
    add(op, "cuda", Constraints(CPU, available=lambda: asked.append(1)))
    for _ in range(3):
        op(X, 1)
    assert len(asked) == 1
    op(torch.zeros(4, 16)[:, ::2], 1)  # other strides
    op(X.bfloat16(), 1)  # another dtype
    op(X, 2)  # another scalar
    op(torch.zeros(33)[1:].view(4, 8), 1)  # another alignment
    assert len(asked) == 5 and set(op.calls) == {"cuda"}


def test_the_memory_of_choices_is_bounded(op, monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_CHOICES", 5)
    for scalar in range(20):
        op(X, scalar)
    assert len(op._choices) <= 5


def test_check_runs_before_the_choice_and_once(monkeypatch):
    monkeypatch.setattr(Op, "registry", {})
    seen = []

    def check(x):
        seen.append(x.shape)
        if x.dim() != 2:
            raise ValueError("sample: x must be [S, H]")

    op = Op("sample", lambda x: x, ("x",), check)
    op(X)
    op(X)
    assert len(seen) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="x must be"):
            op(X[0])
    with use_backend("eager"), pytest.raises(ValueError, match="x must be"):
        op(X[0])


def test_a_plan_is_made_once_and_launched_every_time(op):
    plans, launches = [], []

    def plan(x, y):
        plans.append(x.shape)
        return lambda x, y: launches.append(y) or x

    add(op, "cuda", plan=plan)
    for _ in range(3):
        assert op(X, 7) is X
    assert len(plans) == 1 and launches == [7, 7, 7]
    assert op.backends["cuda"].run(X, 8) is X and len(plans) == 2  # called without an Op around it


def test_a_plan_that_cannot_be_made_is_said_once_and_the_next_backend_runs(op, caplog):
    def plan(x, y):
        raise BackendUnavailable("NVRTC does not know sm_999")

    add(op, "cuda", plan=plan)
    add(op, "triton")
    op(X, 1)
    op(X, 2)
    assert op.calls == ["triton", "triton"]
    assert [r.message for r in caplog.records] == ["H3 Vortex: sample: backend cuda is not used: NVRTC does not know sm_999"]
    with use_backend("cuda"), pytest.raises(BackendUnavailable, match="sample: backend cuda NVRTC does not know sm_999"):
        op(X, 1)


def test_other_errors_of_a_plan_are_not_swallowed(op):
    def plan(x, y):
        raise RuntimeError("CUDA driver: out of memory")

    add(op, "cuda", plan=plan)
    with pytest.raises(RuntimeError, match="out of memory"):
        op(X, 1)
    assert op.calls == []


def test_switching_a_backend_off_and_on(op):
    add(op, "cuda")
    op(X, 1)
    op.disable("cuda", "differs from stock on this GPU")
    assert op.reasons(X, 1) == {"cuda": "differs from stock on this GPU", "eager": None}
    op(X, 1)
    op.enable("cuda")
    op(X, 1)
    assert op.calls == ["cuda", "eager", "cuda"]
    with pytest.raises(ValueError, match="no backend 'eager' to switch off"):
        op.disable("eager", "no")


def test_an_explicit_choice_holds_in_its_thread_and_block_only(op):
    add(op, "cuda")
    names = []
    with use_backend("eager"):
        with use_backend("cuda"):
            names.append(op.choose(X, 1))
        names.append(op.choose(X, 1))
        thread = threading.Thread(target=lambda: names.append(op.choose(X, 1)))
        thread.start()
        thread.join()
    names.append(op.choose(X, 1))
    assert names == ["cuda", "eager", "cuda", "cuda"]


def test_a_forbidden_reference_is_noticed(op, monkeypatch):
    """What the GPU tests rely on: replacing ``run`` of the reference also catches choices made before."""
    op(X, 1)

    def refuse(*_):
        raise AssertionError("reference")

    monkeypatch.setattr(op.backends["eager"], "run", refuse)
    with pytest.raises(AssertionError, match="reference"):
        op(X, 1)

"""The table of ops the runner uses, and the choice between an op and the stock call."""

from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.kernels.patch import ops, runner, verification
from h3_vortex.kernels.patch.decide import Deciding
from h3_vortex.kernels.patch.ops import Features

CPU = torch.device("cpu")


def gate_arguments(device=CPU):
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)
    return x, x.clone(), torch.zeros(6, 64, dtype=torch.bfloat16, device=device), torch.zeros(4, dtype=torch.int32, device=device)


@pytest.mark.parametrize("name", ops.HOMES)
def test_every_op_is_there_under_its_name(name):
    assert callable(ops._load(name)[0]) and ops.operator(name).name == name
    assert hasattr(Features(), ops.HOMES[name][1])


def test_the_reference_does_not_replace_stock():
    backend, reason = ops.backend("gate", Features(), gate_arguments())
    assert backend is None and "cuda:" in reason
    assert ops.backend("gate", Features(allow_eager=True), gate_arguments()) == ("eager", None)


def test_switched_off():
    assert ops.backend("gate", Features(gate=False, allow_eager=True), gate_arguments()) == (None, "switched off")


def test_an_explicit_backend_that_cannot_run_is_an_error():
    with use_backend("cuda"), pytest.raises(BackendUnavailable):
        ops.backend("gate", Features(), gate_arguments())


def test_case_holds_what_chooses_the_code():
    a, b = gate_arguments(), gate_arguments()
    assert ops.case("gate", "cuda", a, CPU) == ops.case("gate", "cuda", b, CPU)
    more_rows = tuple(t if i == 2 else t.repeat(2, *[1] * (t.dim() - 1)) for i, t in enumerate(a))
    assert ops.case("gate", "cuda", more_rows, CPU) == ops.case("gate", "cuda", a, CPU), "the number of tokens is no case of its own"
    fp32_table = (*a[:2], a[2].float(), a[3])
    assert ops.case("gate", "cuda", fp32_table, CPU) != ops.case("gate", "cuda", a, CPU)
    assert ops.case("gate", "triton", a, CPU) != ops.case("gate", "cuda", a, CPU)


def test_the_comparison_runs_on_the_backend_of_the_call(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    compared = []

    class Host(Deciding):
        def compare(self, name, args):
            with pytest.raises(BackendUnavailable, match="cuda"):
                ops.run(name, *args)
            compared.append(name)
            return [], []

    monkeypatch.setattr(ops, "backend", lambda *args: ("cuda", None))  # as on a machine that has it
    host = Host(SimpleNamespace(measuring=False), Features(), "host")
    assert host._try("gate", *gate_arguments()) is not None and compared == ["gate"]
    assert host.calls.fused["gate", "cuda"] == 1


def test_case_tells_a_static_scale_from_a_dynamic_one():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    dynamic = ops.case("nvfp4_quantize", "cuda", ops.complete("nvfp4_quantize", (x, None)), CPU)
    static = ops.case("nvfp4_quantize", "cuda", ops.complete("nvfp4_quantize", (x, torch.ones(()))), CPU)
    assert dynamic != static and "contract:" in dynamic


def test_any_backend_says_why_there_is_none():
    reason = ops.any_backend(CPU)
    assert reason is None or ("cuda: needs cuda" in reason and "\n" not in reason)


@pytest.mark.parametrize("rows", [1, 3, 303])
def test_tables_are_rounded_in_one_piece(rows):
    owner = torch.randn(rows, 6 * 16)
    tables = owner.chunk(6, dim=-1)
    rounded = runner._rounded(tables, torch.bfloat16)
    assert [torch.equal(a, b.bfloat16()) for a, b in zip(rounded, tables, strict=True)] == [True] * 6
    assert len({table.untyped_storage().data_ptr() for table in rounded}) == 1
    assert runner._rounded(rounded, torch.bfloat16) is rounded, "nothing to round"


@pytest.mark.parametrize("make", [
    lambda: [torch.randn(3, 16) for _ in range(6)],
    lambda: [*torch.randn(3, 96).chunk(6, dim=-1)][::-1],
    lambda: [*torch.randn(3, 96).chunk(6, dim=-1)[:5], torch.randn(3, 16)],
    lambda: [torch.randn(1, 16).expand(3, 16)] * 6,
], ids=["separate", "in another order", "one replaced", "one row for all"])  # fmt: skip
def test_tables_of_another_projection_are_rounded_one_by_one(make):
    tables = make()
    rounded = runner._rounded(tables, torch.float16)
    assert [torch.equal(a, b.half()) for a, b in zip(rounded, tables, strict=True)] == [True] * 6

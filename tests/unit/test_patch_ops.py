"""The table of ops the runner uses, and the choice between an op and the stock call."""

import pytest
import torch
from h3_vortex.kernels.dispatch import BackendUnavailable, use_backend
from h3_vortex.kernels.patch import ops
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
    assert ops.case("gate", a, CPU) == ops.case("gate", b, CPU)
    more_rows = tuple(t if i == 2 else t.repeat(2, *[1] * (t.dim() - 1)) for i, t in enumerate(a))
    assert ops.case("gate", more_rows, CPU) == ops.case("gate", a, CPU), "the number of tokens is no case of its own"
    fp32_table = (*a[:2], a[2].float(), a[3])
    assert ops.case("gate", fp32_table, CPU) != ops.case("gate", a, CPU)


def test_case_tells_a_static_scale_from_a_dynamic_one():
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    dynamic = ops.case("nvfp4_quantize", ops.complete("nvfp4_quantize", (x, None)), CPU)
    static = ops.case("nvfp4_quantize", ops.complete("nvfp4_quantize", (x, torch.ones(()))), CPU)
    assert dynamic != static and "contract:" in dynamic


def test_any_backend_says_why_there_is_none():
    reason = ops.any_backend(CPU)
    assert reason is None or ("cuda: needs cuda" in reason and "\n" not in reason)

"""What every launch keeps: streams, graphs, devices, threads, memory, its inputs. One case per bf16 op."""

import threading

import pytest
import torch
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import Op, use_backend
from h3_vortex.tests.gpu import data

pytestmark = pytest.mark.usefixtures("reference_forbidden")
ops = pytest.mark.parametrize("op", stock.OPS)
TOKENS = 2049


def run(case, arguments):
    with use_backend("cuda"):
        return case.ours(*arguments)


@ops
def test_the_automatic_choice_is_cuda(gpu, op):
    case = stock.make(op, TOKENS, gpu)
    assert data.differing(case.ours(*case.inputs()), case.stock(*case.inputs())) == 0  # the reference is forbidden
    assert {name for name, _ in Op.registry[op]._choices.values()} >= {"cuda"}


@ops
def test_side_stream(gpu, op):
    """Ordered behind the work already queued on the current stream, and on no other."""
    case = stock.make(op, TOKENS, gpu)
    expected, late = case.stock(*case.inputs()), case.inputs()
    run(case, case.inputs())
    target = late[-1] if op == "qk_norm_rope" else late[0]
    source = target.clone()
    target.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        target.copy_(source)
        got = run(case, late)
    stream.synchronize()
    assert data.differing(got, expected) == 0


@ops
def test_graph_capture_and_replay(gpu, op):
    case = stock.make(op, TOKENS, gpu)
    expected, arguments = case.stock(*case.inputs()), case.inputs()
    target = arguments[-1] if op == "qk_norm_rope" else arguments[0]
    source = target.clone()
    run(case, case.inputs())  # plan and compile before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        target.copy_(source)
        got = run(case, arguments)
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7.0)
        target.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert data.differing(got, expected) == 0


@ops
def test_not_the_current_device(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = stock.make(op, TOKENS, other)
    assert data.differing(run(case, case.inputs()), case.stock(*case.inputs())) == 0
    assert torch.cuda.current_device() != other.index


@ops
def test_a_fresh_thread(gpu, op):
    """A new thread has no CUDA context of its own yet; the launch may be the first thing it does."""
    case = stock.make(op, TOKENS, gpu)
    expected, arguments, outcome = case.stock(*case.inputs()), case.inputs(), []
    run(case, case.inputs())
    torch.cuda.synchronize()

    def body():
        try:
            outcome.append(run(case, arguments))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not isinstance(outcome[0], BaseException), outcome[0]
    assert data.differing(outcome[0], expected) == 0


@ops
def test_memory_does_not_grow(gpu, op):
    case = stock.make(op, TOKENS, gpu)
    arguments = case.inputs()
    run(case, arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        run(case, arguments)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@ops
def test_no_rows(gpu, op):
    case = stock.make(op, 0, gpu, segments=[(0, 0, 1)])
    got, expected = run(case, case.inputs()), case.stock(*case.inputs())
    assert [t.numel() for t in got] == [0] * len(got)
    assert [t.shape for t in got] == [t.shape for t in expected]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("op", sorted(set(stock.OPS) - {"qk_norm_rope"}))
def test_inputs_are_not_written(gpu, backend, op):
    """Everything the op does not own keeps its bytes: weights, tables, map, the residual branch, the input of an out-of-place op."""
    entry = Op.registry[op]
    if backend not in entry.backends:
        pytest.skip(f"{op} has no {backend} backend")
    owned = {"modulate": {"h"}, "gate": {"x"}, "gate_norm_modulate": {"x"}}.get(op, set())
    seen = []
    original = entry.check

    def record(*args):
        seen.append({n: (t, t.clone()) for n, t in zip(entry.signature, args, strict=True) if isinstance(t, torch.Tensor)})
        return original(*args)

    entry.check = record
    try:
        entry._choices.clear()
        case = stock.make(op, TOKENS, gpu)
        with use_backend(backend):
            case.ours(*case.inputs())
    finally:
        entry.check = original
    (arguments,) = seen
    for name, (tensor, before) in arguments.items():
        changed = not torch.equal(tensor, before)
        assert changed == (name in owned), f"{op}: {name} {'was written' if changed else 'was not written'}"


def test_segment_ends_inside_a_block_of_tokens(gpu):
    """The blocks that walk down several tokens change the table row whenever the token's does."""
    for op in ("gate", "modulate"):
        data.assert_stock_bytes(stock.make(op, 67, gpu, segments=[(i, i + 1, i * 5 % 6) for i in range(67)]), "cuda")

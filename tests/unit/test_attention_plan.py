"""One run's attention: decided once, checked on its own data, never changed on the way; ``fastest dense`` by measurement."""

import logging
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels import attention, cache
from h3_vortex.kernels.attention import measure, planning, registry, sage
from h3_vortex.kernels.attention.backend import Backend, token_major
from h3_vortex.kernels.attention.call import Call
from h3_vortex.kernels.attention.environment import Environment

HEADS, DIM = 10, 16
CPU = torch.device("cpu")


class Clock:
    """Stands in for the time module: only backends make time pass."""

    now = 0.0

    @classmethod
    def monotonic(cls):
        return cls.now

    perf_counter = monotonic

    @classmethod
    def pass_by(cls, seconds):
        cls.now += seconds


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "_small_runs", {})
    monkeypatch.setattr(planning, "_said", set())
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(measure, "time", Clock)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="h3_vortex")
    return lambda: [r.getMessage() for r in caplog.records]


def qkv(rows=90, seed=0, dtype=torch.bfloat16):
    """q, k, v as views of one projection buffer, and the buffer."""
    buffer = torch.randn(rows, 3 * HEADS * DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [t.view(1, rows, HEADS, DIM) for t in buffer.split(HEADS * DIM, -1)], buffer


def exact(q, k, v):
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).float() for t in (q, k, v)))
    return token_major(out.transpose(1, 2)).to(q.dtype)


class Fake(Backend):
    """Exact attention with a chosen time, wish and defect."""

    automatic = True
    exactness = "E2"

    def __init__(self, name, seconds=0.001, refusal=None, missing=None, change=None, error=None, exactness="E2", max_rows=None):
        self.name, self.seconds, self.refusal, self.absent, self.change, self.error = name, seconds, refusal, missing, change, error
        self.exactness, self.max_rows, self.runs = exactness, max_rows, []

    def missing(self, env):
        return self.absent

    def refuses(self, call, env):
        return f"takes {self.max_rows} rows at most" if self.max_rows and call.rows > self.max_rows else self.refusal

    def run(self, q, k, v, prefix_rows):
        self.runs.append(tuple(q.shape))
        if self.error:
            raise self.error
        Clock.pass_by(self.seconds)
        out = exact(q, k, v)
        return self.change(out) if self.change else out


def noise_in_the_tail(out):
    if out.shape[0] == 90:  # a fault of long sequences, not of the small run
        out[-8:] = 100 * torch.randn_like(out[-8:])
    return out


def scaled(out):
    return out * 1.01


@pytest.fixture
def world(monkeypatch):
    """Registers fake backends; the machine says CUDA so that there is something to measure."""

    def build(*fakes):
        monkeypatch.setattr(registry, "BACKENDS", {f.name: f for f in fakes})
        return Environment(torch.device("cuda", 0), (8, 9), "Test GPU", "580.1", "13.0", None, importer=None, version=lambda name: None)

    return build


class Stock:
    def __init__(self, seconds=0.001):
        self.seconds, self.runs = seconds, []

    def __call__(self, q, k, v):
        self.runs.append(tuple(q.shape))
        Clock.pass_by(self.seconds)
        return exact(q, k, v)


# -- stock ----------------------------------------------------------------------------------------------------------------------------


def test_stock_hands_the_very_tensors_to_the_host():
    tensors, _ = qkv()
    seen = []
    plan = attention.plan(attention.STOCK)
    assert plan.is_stock and plan.backend == "stock" and plan.exactness == "E0"
    result = object()
    assert plan(*tensors, lambda *given: seen.extend(given) or result) is result
    assert all(a is b for a, b in zip(seen, tensors, strict=True))
    assert plan.report()["calls"] == 1 and plan.report()["measured"] == []


def test_report_10_a_plan_leaves_nothing_behind(world):
    """A toggled node must be as if it had never been there."""
    world(Fake("broken", change=lambda out: torch.full_like(out, 7)))
    tensors, buffer = qkv()
    before = buffer.clone()
    with pytest.raises(attention.AttentionUnavailable):
        attention.plan("broken")(*tensors, Stock())
    stock = Stock()
    assert torch.equal(attention.plan(attention.STOCK)(*tensors, stock), exact(*tensors))
    assert torch.equal(buffer, before)


# -- a backend by name ------------------------------------------------------------------------------------------------------------------


def test_sdpa_flash_runs_on_strided_views_and_leaves_them_alone():
    tensors, buffer = qkv()
    before = buffer.clone()
    plan = attention.plan("sdpa_flash")
    out = plan(*tensors, Stock())
    q, k, v = (t.transpose(1, 2).contiguous() for t in tensors)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.shape == (90, HEADS * DIM) and out.is_contiguous()
    assert torch.equal(out, dense.transpose(1, 2).reshape(90, -1)) and torch.equal(buffer, before)
    assert plan.backend == "sdpa_flash" and plan.exactness == "E1" and 0 < plan.errors[90] < 0.01
    assert plan.line() == f"sdpa_flash (E1, {attention.EXACTNESS['E1']}): asked for by name"


def test_head_slices_give_the_heads_of_the_whole():
    tensors, _ = qkv()
    sliced = attention.plan("head_sliced:sdpa_flash")
    out = sliced(*tensors, Stock())  # 8 + 2 heads
    assert torch.equal(out, attention.plan("sdpa_flash")(*tensors, Stock())) and sliced.backend == "head_sliced:sdpa_flash"


def test_a_named_backend_that_cannot_run_raises_and_says_the_way_out(world):
    absent, choosy = Fake("absent", missing="is not installed. Do this."), Fake("choosy", refusal="needs fp16")
    env = world(absent, choosy, Fake("bad", error=ValueError("sm99")))
    tensors, _ = qkv()
    with pytest.raises(attention.AttentionUnavailable, match="absent is not installed. Do this."):
        attention.plan("absent", env=env)
    for name, words in (("absent", "is not installed"), ("choosy", "needs fp16"), ("bad", "small run failed: ValueError: sm99")):
        stock = Stock()
        with pytest.raises(attention.AttentionUnavailable, match=words + ".*Choose 'stock"):
            attention.plan(name)(*tensors, stock)
        assert stock.runs == []
    with pytest.raises(ValueError, match="unknown"):
        attention.plan("no such thing")


def test_report_1_noise_is_never_handed_on(world):
    world(Fake("noisy", change=noise_in_the_tail))
    tensors, _ = qkv()
    with pytest.raises(attention.AttentionUnavailable, match=r"off by .*% from exact attention at 90 rows"):
        attention.plan("noisy")(*tensors, Stock())


def test_nan_is_never_handed_on(world):
    world(Fake("nan", change=lambda out: out * float("nan")))
    with pytest.raises(attention.AttentionUnavailable, match="nan%"):
        attention.plan("nan")(*qkv()[0], Stock())


def test_report_12_the_error_is_measured_and_reported(world):
    world(Fake("blurry", change=scaled))
    plan = attention.plan("blurry")
    plan(*qkv()[0], Stock())
    assert plan.report()["relative_error"] == {90: pytest.approx(0.01, rel=0.3)} and plan.exactness == "E2"


def test_checks_happen_once_per_length(world):
    world(fake := Fake("dense"))
    tensors, _ = qkv()
    plan = attention.plan("dense")
    for _ in range(3):
        plan(*tensors, Stock())
    assert [s for s in fake.runs if s[1] == 90] == [(1, 90, HEADS, DIM)] * 3 and len(fake.runs) == 4  # one small run
    other = qkv(70)[0]
    plan(*other, Stock())
    assert sorted(plan.errors) == [70, 90] and plan.calls == 4
    attention.plan("dense")(*tensors, Stock())
    assert len(fake.runs) == 6, "the small run belongs to the process, not to the plan"


def test_one_off_work_is_done_in_the_pause_and_the_launch_outside(world):
    state = SimpleNamespace(paused=False, log=[])

    @contextmanager
    def pause():
        assert not state.paused, "pauses do not nest"
        state.paused = True
        yield
        state.paused = False

    class Watching(Fake):
        def run(self, q, k, v, prefix_rows):
            state.log.append((q.shape[1], state.paused))
            return super().run(q, k, v, prefix_rows)

    env = world(Watching("dense"))
    attention.plan("dense", pause=pause)(*qkv()[0], Stock())
    assert state.log == [(1088, True), (90, False)]
    state.log.clear()
    attention.plan(attention.FASTEST, pause=pause, env=env)(*qkv()[0], Stock(0.01))
    assert state.log and state.log[-1] == (90, False) and all(paused for _, paused in state.log[:-1])


# -- limits and copies --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_sage(monkeypatch):
    """sageattention with index limits of a few rows: what does the kernel get to see?"""
    seen = []

    def sageattn(q, k, v, tensor_layout, is_causal, sm_scale, **kwargs):
        seen.append([t.stride(1) for t in (q, k, v)])
        assert tensor_layout == "NHD" and kwargs == {"smooth_k": False} and sm_scale is None and is_causal is False
        return exact(q, k, v).view(q.shape)

    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn, sageattn_qk_int8_pv_fp8_cuda=sageattn))
    limit = 89 * 480  # 90 rows at the buffer's stride
    monkeypatch.setattr(sage, "WIDTHS", {(8, 9): {"q": limit, "k": limit, "v": 2 * limit, "own": limit, "smoothed": True}})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sage.Sage2, "refuses", lambda self, call, env: None if (call.rows - 1) * call.inner <= limit else "too long")
    monkeypatch.setattr(measure, "small_run", lambda *args: None)
    return SimpleNamespace(seen=seen, env=Environment(torch.device("cuda", 0), (8, 9), "Test GPU", "580", "13.0"))


def test_report_3_only_the_offending_tensor_is_copied_with_one_line(tiny_sage, said):
    just = attention.plan("sage2", env=tiny_sage.env)
    fits, _ = qkv(90)
    just(*fits, Stock())
    assert tiny_sage.seen == [[480, 480, 480]] and just.report()["copies"] == {}
    over, buffer = qkv(91)
    before = buffer.clone()
    plan = attention.plan("sage2", env=tiny_sage.env)
    out = plan(*over, Stock())
    plan(*over, Stock())
    assert tiny_sage.seen[1:] == [[160, 480, 480]] * 2, "q alone: k is smoothed first, v has the wider integer"
    assert plan.report()["copies"] == {"q": 2} and torch.equal(buffer, before)
    assert torch.equal(out, exact(*(t.contiguous() for t in over))), "the result is the contiguous one"
    lines = [line for line in said() if "copies" in line]
    assert len(lines) == 1 and "91 rows x stride 480" in lines[0] and "90 rows fit" in lines[0]


def test_a_backend_that_would_overflow_is_not_launched(tiny_sage):
    with pytest.raises(attention.AttentionUnavailable, match="sage2 too long"):
        attention.plan("sage2", env=tiny_sage.env)(*qkv(400)[0], Stock())
    assert tiny_sage.seen == []


def test_report_13_a_stream_change_after_the_first_call_is_caught(tiny_sage, monkeypatch):
    tensors, _ = qkv(90)
    plan = attention.plan("sage2", env=tiny_sage.env)
    plan(*tensors, Stock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: 1)
    with pytest.raises(attention.AttentionUnavailable, match="default stream"):
        plan(*tensors, Stock())
    assert len(tiny_sage.seen) == 1


def test_sage3_is_given_its_own_k(monkeypatch):
    """It subtracts the mean from the K it gets, in place."""

    def sageattn3_blackwell(q, k, v, is_causal):
        k -= k.mean(-2, keepdim=True)
        return exact(*(t.transpose(1, 2) for t in (q, k, v))).view(1, -1, HEADS, DIM).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "sageattn3", SimpleNamespace(sageattn3_blackwell=sageattn3_blackwell))
    tensors, buffer = qkv()
    before = buffer.clone()
    out = registry.backend("sage3").launch(*tensors)
    assert torch.equal(buffer, before) and measure.relative_error(*tensors, out) < 0.01


def test_sol_keeps_the_rows_ahead_of_the_video_exact(monkeypatch):
    seen = {}

    def sol_attn(q, k, v, **kwargs):
        seen.update(kwargs)
        return exact(q, k, v).view(q.shape)

    monkeypatch.setitem(sys.modules, "comfy_kitchen", SimpleNamespace(sol_attn=sol_attn))
    registry.backend("sol").launch(*qkv()[0], prefix_rows=514)
    assert seen == {"tau": 1.3, "sink_blocks": [0, 9], "token_aug": 256}


# -- fastest dense -------------------------------------------------------------------------------------------------------------------------


def test_fastest_dense_takes_the_fastest_and_shows_its_numbers(world, said):
    fast, slow, lost = Fake("fast", change=scaled), Fake("slow", 0.05), Fake("lost", missing="is not installed")
    env = world(fast, slow, lost)
    plan = attention.plan(attention.FASTEST, env=env)
    assert plan.backend is None and "not decided" in plan.line()
    tensors, _ = qkv()
    out = plan(*tensors, Stock(0.02))
    assert plan.backend == "fast" and plan.exactness == "E2" and torch.equal(out, scaled(exact(*tensors)))
    report = plan.report()
    assert report["choice"] == "fastest dense" and report["why"] == "measured now" and report["calls"] == 1
    lines = "\n".join(report["measured"])
    assert lines.index("fast") < lines.index("stock") < lines.index("slow") and "lost            is not installed" in lines
    assert "relative error 1.0" in lines and "ms at 8 of 10 heads" in lines
    assert any("measuring backends at 90 rows x 10 heads x 16" in line for line in said())


def test_a_candidate_with_stocks_bytes_is_called_exact(world):
    env = world(Fake("same"), Fake("other", 0.05, change=scaled))
    plan = attention.plan(attention.FASTEST, env=env)
    plan(*qkv()[0], Stock(0.02))
    assert plan.backend == "same" and plan.exactness == "E0" and "byte-equal to stock" in plan.report()["measured"][0]


def test_report_17_stock_is_kept_unless_it_is_beaten(world):
    env = world(Fake("slower", 0.03), Fake("slowest", 0.06))
    plan = attention.plan(attention.FASTEST, env=env)
    stock = Stock(0.01)
    plan(*qkv()[0], stock)
    assert plan.is_stock and plan.exactness == "E0" and stock.runs[-1] == (1, 90, HEADS, DIM)


@pytest.mark.parametrize(("ms", "first"), [(100.0, "stock"), (98.5, "stock"), (97.9, "other"), (130.0, "stock")])
def test_a_gain_within_the_noise_does_not_leave_stock(ms, first):
    entries = {"stock": {"slice_ms": 14.0, "ms": 100.0}, "other": {"slice_ms": 13.0, "ms": ms}, "far": {"slice_ms": 20.0}}
    order = measure.ranking({"heads": 56, "slice_heads": 8, "candidates": {**entries, "out": {"refused": "x"}}})
    assert order[0] == first and set(order) == {"stock", "other", "far"} and order[-1] == "far"


def test_a_slice_time_is_not_taken_for_less_than_it_is():
    """At the full shape the power cap slows everything down; a candidate that was not timed there must not win by that."""
    entries = {"stock": {"slice_ms": 10.0, "ms": 84.0}, "winner": {"slice_ms": 8.0, "ms": 67.0}, "slower": {"slice_ms": 9.3}}
    assert measure.ranking({"heads": 56, "slice_heads": 8, "candidates": entries})[0] == "winner"


def test_the_choice_is_kept_on_disk_for_the_shape_bucket(world):
    fast, slow = Fake("fast", change=scaled), Fake("slow", 0.03)
    env = world(fast, slow)
    attention.plan(attention.FASTEST, env=env)(*qkv(90)[0], Stock(0.02))
    timed = len(slow.runs)
    again = attention.plan(attention.FASTEST, env=env)
    again(*qkv(92)[0], Stock(0.02))
    assert again.backend == "fast" and again.report()["why"] == "measured earlier on this machine" and len(slow.runs) == timed
    assert again.errors[92] == pytest.approx(0.01, rel=0.3), "the remembered choice is still checked on its own data"
    attention.plan(attention.FASTEST, env=env)(*qkv(180)[0], Stock(0.02))
    assert len(slow.runs) > timed, "another bucket is measured"


def test_another_driver_package_or_set_of_backends_is_measured_anew(world, monkeypatch):
    env = world(Fake("a"), Fake("b"))
    automatic = registry.automatic()
    call = Call.of(*qkv()[0])
    names = set()
    for change in ({}, {"driver": "581"}, {"gpu": "Other"}, {"torch_version": "2.99"}, {"version": lambda name: "9.9"}):
        names.add(measure.cache_name(call, Environment(**{**_fields(env), **change}), automatic))
    names.add(measure.cache_name(call, env, automatic[:1]))
    names.add(measure.cache_name(Call.of(*qkv(500)[0]), env, automatic))
    names.add(measure.cache_name(call, env, automatic, "attention_sage"))
    with monkeypatch.context() as updated:
        updated.setattr(cache, "sources", lambda: "another version of this pack")
        names.add(measure.cache_name(call, env, automatic))
    assert len(names) == 9
    assert measure.cache_name(Call.of(*qkv(92)[0]), env, automatic) in names


def _fields(env):
    names = ("device", "capability", "gpu", "driver", "cuda", "hip", "torch_version", "importer", "version")
    return {name: getattr(env, name) for name in names}


def test_report_1_a_fast_but_wrong_backend_is_refused_with_its_number(world):
    env = world(Fake("noisy", change=noise_in_the_tail), Fake("good", 0.01, change=scaled))
    plan = attention.plan(attention.FASTEST, env=env)
    plan(*qkv()[0], Stock(0.05))
    assert plan.backend == "good" and any("noisy" in line and "from exact attention" in line for line in plan.report()["measured"])


def test_a_backend_that_raises_is_refused_and_the_others_go_on(world):
    env = world(Fake("oom", error=torch.OutOfMemoryError("tried to allocate 2 GiB")), Fake("good", change=scaled))
    plan = attention.plan(attention.FASTEST, env=env)
    plan(*qkv()[0], Stock(0.02))
    assert plan.backend == "good" and any("tried to allocate 2 GiB" in line for line in plan.report()["measured"])


def test_another_stock_is_measured_anew(world):
    """ComfyUI started with --use-sage-attention has another stock: its bytes and its time are not those that were measured."""
    env = world(Fake("fast"))
    classes = []
    for stock, change in (("attention_pytorch", None), ("attention_sage", scaled), ("attention_sage", scaled)):
        plan = attention.plan(attention.FASTEST, host=attention.Host(stock=stock), env=env)
        runs = Stock(0.02)
        plan(*qkv()[0], lambda *a, runs=runs, change=change: change(runs(*a)) if change else runs(*a))
        assert plan.backend == "fast"
        classes.append((plan.exactness, plan.report()["why"]))
    assert classes == [("E0", "measured now"), ("E2", "measured now"), ("E2", "measured earlier on this machine")]


def test_want_of_memory_is_not_remembered(world):
    fast = Fake("fast", error=torch.OutOfMemoryError("tried to allocate 2 GiB"), change=scaled)
    env = world(fast)
    for error, backend in ((fast.error, "stock"), (None, "fast")):
        fast.error = error
        plan = attention.plan(attention.FASTEST, env=env)
        plan(*qkv()[0], Stock(0.02))
        assert plan.backend == backend


def test_the_measurement_ends_when_its_time_is_used_up(world):
    env = world(Fake("first", 0.02, change=scaled), Fake("second", 0.02))
    tensors, _ = qkv()
    # two small runs (0.04 s), stock (0.1 + 3 x 0.1 s); the first candidate ends it
    record = measure.search(*tensors, registry.automatic(), Stock(0.1), env, budget=0.45)
    assert record["seconds"] < 0.45 + 0.1, "nothing was begun after the deadline"
    refused = [name for name, entry in record["candidates"].items() if "used up" in entry.get("refused", "")]
    assert refused == ["second"] and "slice_ms" in record["candidates"]["stock"]
    assert all("ms" not in entry for entry in record["candidates"].values()), "no time for the full shape"


def test_a_remembered_winner_that_cannot_run_gives_way_before_the_run_begins(world, said):
    fast, good = Fake("fast", max_rows=90), Fake("good", 0.01, change=scaled)
    env = world(fast, good)
    attention.plan(attention.FASTEST, env=env)(*qkv(90)[0], Stock(0.05))
    plan = attention.plan(attention.FASTEST, env=env)
    plan(*qkv(92)[0], Stock(0.05))
    assert plan.backend == "good" and plan.report()["why"] == "fast was faster but takes 90 rows at most"
    assert sum("using good at 92 rows" in line for line in said()) == 1


def test_when_nothing_is_left_stock_runs(world):
    env = world(Fake("fast", max_rows=90), Fake("lost", missing="is not installed"))
    attention.plan(attention.FASTEST, env=env)(*qkv(90)[0], Stock(0.02))
    plan = attention.plan(attention.FASTEST, env=env)
    stock = Stock()
    out = plan(*qkv(92)[0], stock)
    assert plan.is_stock and torch.equal(out, exact(*qkv(92)[0])) and len(stock.runs) == 1


def test_a_class_change_in_mid_run_is_impossible(world):
    """Prompts of different length give model calls of different length in one run."""
    fast, good = Fake("fast", max_rows=90), Fake("good", 0.01, change=scaled)
    env = world(fast, good)
    for plan in (attention.plan("fast"), attention.plan(attention.FASTEST, env=env)):
        plan(*qkv(90)[0], Stock(0.05))
        assert plan.backend == "fast"
        stock = Stock()
        with pytest.raises(attention.AttentionUnavailable, match="run began with fast, which now takes 90 rows at most"):
            plan(*qkv(92)[0], stock)
        assert plan.backend == "fast" and stock.runs == [] and (1, 92, HEADS, DIM) not in good.runs
        plan(*qkv(90)[0], Stock())


def test_fastest_dense_without_cuda_is_stock():
    plan = attention.plan(attention.FASTEST)
    stock = Stock()
    plan(*qkv()[0], stock)
    assert plan.is_stock and plan.report()["why"] == "nothing to measure without a CUDA device" and len(stock.runs) == 1


# -- other choices in the workflow ------------------------------------------------------------------------------------------------


def test_report_20_an_override_of_another_node_is_kept(world, said):
    env = world(Fake("fast"))
    plan = attention.plan(attention.FASTEST, host=attention.Host(override="Model Attention Backend"), env=env)
    stock = Stock()
    plan(*qkv()[0], stock)
    assert plan.is_stock and len(stock.runs) == 1 and "Model Attention Backend" in plan.report()["why"]
    assert any("steps aside" in line for line in said())


def test_reports_18_19_two_explicit_choices_are_not_guessed_between(world):
    world(Fake("fast"))
    host = attention.Host(override="Model Sparse Attention")
    with pytest.raises(attention.AttentionUnavailable, match="two nodes choose it: Model Sparse Attention .* asks for fast"):
        attention.plan("fast", host=host)
    assert attention.plan(attention.STOCK, host=host).is_stock


def test_a_choice_on_the_node_outranks_the_checkpoints(world, said):
    host = attention.Host(declared="comfy_kitchen_int8")
    env = world(Fake("fast"))
    plan = attention.plan(attention.FASTEST, host=host, env=env)
    plan(*qkv()[0], Stock(0.02))
    assert plan.backend == "fast" and any("outranks the checkpoint's preference (comfy_kitchen_int8)" in line for line in said())
    assert attention.plan(attention.STOCK, host=host).is_stock


# -- the yardstick ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relative_error_of_exact_attention_is_the_rounding_of_its_output(dtype):
    tensors, _ = qkv(333, dtype=dtype)
    error = measure.relative_error(*tensors, exact(*tensors))
    assert 0 < error < torch.finfo(dtype).eps, "a rounded output is off by less than half a unit in the last place"


@pytest.mark.parametrize("row", [0, 332])
def test_relative_error_sees_the_first_and_the_last_row(row):
    tensors, _ = qkv(333)
    out = exact(*tensors)
    out[row] += 5.0
    assert measure.relative_error(*tensors, out) > measure.MAX_ERROR


def test_equal_bytes_tell_signed_zeros_apart_and_nans_not():
    a = torch.tensor([0.0, float("nan")], dtype=torch.bfloat16)
    assert measure.same_bytes(a, a.clone()) and not measure.same_bytes(a, torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16))
    assert not measure.same_bytes(a, a.half())

"""Which attention backends may run: index limits in integers, probes with described machines, messages.

Tests named ``report_N`` stand for user reports of this kind of failure; the number is the row in the collection of public reports.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels.attention import CHOICES, registry, sage_install
from h3_vortex.kernels.attention.backend import guard
from h3_vortex.kernels.attention.call import INT32_MAX, UINT32_MAX, Call, max_rows
from h3_vortex.kernels.attention.environment import Environment
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, DIM = 56, 128
INNER, STRIDE = HEADS * DIM, 3 * HEADS * DIM
CUDA = torch.device("cuda", 0)


def importer(**modules):
    """Imports only what is named; an exception given as a module is raised."""

    def load(name):
        module = modules.get(name.replace(".", "_"))
        if module is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if isinstance(module, BaseException):
            raise module
        return module

    return load


def sage(new=True, smooth_k=False):
    """A sageattention package by its symbols. ``smooth_k``: its sageattn names that argument."""
    def plain(q, k, v, tensor_layout="HND", **kwargs): ...
    def smoothing(q, k, v, tensor_layout="HND", smooth_k=True, **kwargs): ...

    module = SimpleNamespace(sageattn=smoothing if smooth_k else plain)
    if new:
        module.sageattn_qk_int8_pv_fp16_triton = plain
    return module


KITCHEN = SimpleNamespace(
    int8_attention=None, int8_attention_is_available=lambda device: True, sol_attn=None, sol_attn_is_available=lambda device: True)


def machine(capability=(8, 9), versions=None, **modules):
    version = (versions or {}).get
    return Environment(
        CUDA, capability, "Test GPU", "580.1", "13.0", None, "2.10.0+cu130", (3, 13), "linux", importer(**modules), version)


def call(rows, row_stride=STRIDE, heads=HEADS, **more):
    """q, k and v as meta views of one projection buffer (or dense, with ``row_stride=INNER``)."""
    if row_stride == INNER:
        views = [torch.empty(1, rows, heads, DIM, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    else:
        qkv = torch.empty(rows, row_stride, dtype=torch.bfloat16, device="meta")
        views = [t.view(1, rows, HEADS, DIM)[:, :, :heads] for t in qkv.split(INNER, -1)]
    return Call(**{**vars(Call.of(*views)), "device": CUDA, **more})


def test_a_call_describes_views_without_reading_them():
    described = call(37_810)
    assert (described.rows, described.heads, described.head_dim) == (37_810, HEADS, DIM)
    assert described.q == described.k == described.v and described.q.row_stride == STRIDE and described.q.vector_loads
    assert described.last_row("q") == 37_809 * STRIDE


def test_a_call_refuses_tensors_that_disagree():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"k is \(1, 5, 2, 8\)"):
        Call.of(q, torch.zeros(1, 5, 2, 8), q)
    with pytest.raises(ValueError, match="float16"):
        Call.of(q, q, q.half())
    with pytest.raises(ValueError, match=r"q must be \[1, S, H, D\]"):
        Call.of(q[0], q, q)


def test_the_limits_of_the_issue():
    assert max_rows(INT32_MAX, STRIDE) == 99_865
    assert max_rows(UINT32_MAX, STRIDE) == 199_729
    assert max_rows(INT32_MAX, INNER) == 299_594
    assert max_rows(UINT32_MAX, INNER) == 599_187


# (capability, rows that every tensor may have strided, tensors copied one row later)
SAGE2_STRIDED = [
    ((7, 5), 99_865, ("q", "v")), ((8, 0), 99_865, ("q",)), ((8, 6), 99_865, ("q", "v")), ((8, 7), 99_865, ("q", "v")),
    ((8, 9), 99_865, ("q",)), ((9, 0), 99_865, ("q",)), ((12, 0), 199_729, ("q", "k", "v")), ((12, 1), 199_729, ("q", "k", "v")),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "rows", "offenders"), SAGE2_STRIDED)
def test_report_2_limit_table_of_sage2_in_one_place(capability, rows, offenders):
    env = machine(capability, sageattention=sage())
    backend = registry.backend("sage2")
    assert guard(backend, call(rows), env).copies == ()
    over = guard(backend, call(rows + 1), env)
    assert over.refusal is None and over.copies == offenders
    assert f"{rows:,} rows fit" in over.why_copies
    assert guard(backend, call(rows + 1, INNER), env).copies == ()


@pytest.mark.parametrize(("rows", "copies"), [(99_863, ()), (99_865, ()), (99_866, ("q",)), (110_000, ("q",)), (199_730, ("q", "v"))])
def test_report_3_sm89_grey_noise_past_int32(rows, copies):
    assert guard(registry.backend("sage2"), call(rows), machine((8, 9), sageattention=sage())).copies == copies


def test_report_3_a_build_that_takes_smooth_k_reads_k_strided_too():
    verdict = guard(registry.backend("sage2"), call(99_866), machine((8, 9), sageattention=sage(smooth_k=True)))
    assert verdict.copies == ("q", "k")


def test_report_3_cloned_v_is_not_copied_again():
    described = call(250_000)
    described = Call(**{**vars(described), "v": call(250_000, INNER).v})
    assert guard(registry.backend("sage2"), described, machine((8, 9), sageattention=sage())).copies == ("q",)


@pytest.mark.parametrize(("rows", "noisy"), [(168_126, False), (183_866, False), (198_974, False), (207_410, True), (219_486, True)])
def test_report_1_sm120_noise_at_1920x1088x15s(rows, noisy):
    """Clean jobs run as they are, the noisy ones are read from contiguous copies."""
    verdict = guard(registry.backend("sage2"), call(rows), machine((12, 0), sageattention=sage()))
    assert verdict.refusal is None and verdict.copies == (("q", "k", "v") if noisy else ())


def test_report_14_a5000_illegal_access_at_8_seconds():
    """sm86 multiplies v's offsets in int32 as well."""
    assert guard(registry.backend("sage2"), call(109_062), machine((8, 6), sageattention=sage())).copies == ("q", "v")


def test_past_the_dense_limit_sage_is_refused():
    verdict = guard(registry.backend("sage2"), call(299_595), machine((8, 6), sageattention=sage()))
    assert "299,594 rows fit" in verdict.refusal and verdict.copies == ()
    assert guard(registry.backend("sage2"), call(299_594), machine((8, 6), sageattention=sage())).refusal is None


def test_sage1_copies_q_and_k_and_stops_at_the_dense_limit():
    env = machine((9, 0), sageattention=sage(new=False))
    backend = registry.backend("sage1")
    assert guard(backend, call(99_865), env).copies == ()
    assert guard(backend, call(99_866), env).copies == ("q", "k")
    assert "299,594" in guard(backend, call(299_595), env).refusal


def test_kitchen_reads_strided_rows_in_64_bits_and_stops_at_its_own_range_check():
    env = machine(comfy_kitchen=KITCHEN)
    backend = registry.backend("kitchen_int8")
    assert guard(backend, call(250_000), env) == guard(backend, call(100), env)
    assert guard(backend, call(299_520), env).refusal is None
    assert "299,520 rows fit" in guard(backend, call(299_521), env).refusal


def test_slicing_heads_moves_the_limits_of_own_and_copied_tensors():
    env = machine((8, 6), sageattention=sage(), comfy_kitchen=KITCHEN)
    assert guard(registry.backend("head_sliced:kitchen_int8"), call(320_000), env).refusal is None
    sliced = guard(registry.backend("head_sliced:sage2"), call(320_000), env)
    assert sliced.refusal is None and sliced.copies == ("q", "v"), "the slices keep the buffer's row stride"


@pytest.mark.parametrize("rows", [37_810, 99_866, 250_000])
def test_sdpa_and_flash_attention_address_in_64_bits(rows):
    env = machine((9, 0), flash_attn=SimpleNamespace(flash_attn_func=None), flash_attn_interface=SimpleNamespace(flash_attn_func=None))
    for name in ("flash_attn2", "flash_attn3"):
        assert guard(registry.backend(name), call(rows), env) == guard(registry.backend(name), call(64), env)
    verdict = guard(registry.backend("sdpa_cudnn"), call(rows), env)
    assert verdict.refusal is None and verdict.copies == ()


def test_the_memory_efficient_kernel_gets_copies_past_int32():
    """It read outside the projection at 110,000 rows on an H200: an illegal memory access, which no ``except`` can mend."""
    env = machine((9, 0))
    backend = registry.backend("sdpa_efficient")
    assert guard(backend, call(99_865), env).copies == ()
    assert guard(backend, call(110_000), env).copies == ("q", "k", "v")


def test_unknown_index_widths_are_taken_as_int32():
    env = machine((9, 0), flash_attn_cute=SimpleNamespace(flash_attn_func=None), comfy_kitchen=KITCHEN)
    for name in ("flash_attn4", "sol"):
        assert guard(registry.backend(name), call(99_865), env).copies == ()
        assert guard(registry.backend(name), call(99_866), env).copies == ("q", "k", "v")


@given(
    rows=st.integers(1, 700_000), row_stride=st.sampled_from([INNER, 2 * INNER, STRIDE, 8 * INNER]),
    capability=st.sampled_from([c for c, _, _ in SAGE2_STRIDED]), smooth=st.booleans())  # fmt: skip
@settings(deadline=None)
def test_whatever_passes_the_guard_is_addressable(rows, row_stride, capability, smooth):
    """After the copies, no product token x stride leaves the integer its reader uses."""
    env, backend = machine(capability, sageattention=sage(smooth_k=smooth)), registry.backend("sage2")
    described = call(rows, row_stride) if row_stride == INNER else Call(**{**vars(call(1)), "rows": rows, **{
        name: type(call(1).q)(row_stride, True) for name in ("q", "k", "v")}})
    verdict = guard(backend, described, env)
    if verdict.refusal is None:
        after = described.dense(verdict.copies)
        limits = backend.limits(after, env)
        assert all(after.last_row(name) <= limit for name, limit in limits.items())
        assert set(limits) >= {"q", "v"}


def test_misaligned_rows_are_copied_and_only_those():
    buffer = torch.zeros(64 * STRIDE + 8, dtype=torch.bfloat16)
    aligned, shifted = buffer[: 64 * STRIDE], buffer[1 : 64 * STRIDE + 1]
    q, _, v = (t.view(1, 64, HEADS, DIM) for t in aligned.view(64, STRIDE).split(INNER, -1))
    k = shifted.view(64, STRIDE)[:, INNER : 2 * INNER].view(1, 64, HEADS, DIM)
    verdict = guard(registry.backend("sdpa_flash"), Call.of(q, k, v), Environment(torch.device("cpu")))
    assert verdict.copies == ("k",) and "16-byte" in verdict.why_copies


def test_calls_that_no_backend_may_run():
    env = machine(comfy_kitchen=KITCHEN)
    assert "gradients" in guard(registry.backend("kitchen_int8"), call(100, gradients=True), env).refusal
    assert "at least one row" in guard(registry.backend("kitchen_int8"), Call(**{**vars(call(1)), "rows": 0}), env).refusal
    assert "float32" in guard(registry.backend("sage2"), call(100, dtype=torch.float32), machine(sageattention=sage())).refusal
    assert "more than 1,024 rows" in guard(
        registry.backend("sage3"), call(1024), machine((12, 0), sageattn3=SimpleNamespace(sageattn3_blackwell=None))).refusal


@pytest.mark.parametrize("state", [{"own_stream": True}, {"capturing": True}])
def test_report_13_sage2_keeps_to_the_default_stream(state):
    env = machine(sageattention=sage(), comfy_kitchen=KITCHEN)
    assert "default stream" in guard(registry.backend("sage2"), call(1000, **state), env).refusal
    assert guard(registry.backend("kitchen_int8"), call(1000, **state), env).refusal is None


NOWHERE = [
    Environment(torch.device("cpu"), importer=importer(), version={}.get),
    Environment(CUDA, (9, 4), "MI300X", "unknown", None, "6.4", "2.10.0+rocm6.4", (3, 12), "linux", importer(), {}.get),
    Environment(torch.device("mps"), importer=importer(), version={}.get),
    Environment(torch.device("xpu"), importer=importer(), version={}.get),
]


@pytest.mark.parametrize("env", NOWHERE, ids=lambda e: e.hip or e.device.type)
@pytest.mark.parametrize("name", [n for n in CHOICES if n not in (registry.STOCK, registry.FASTEST)])
def test_report_6_other_hardware_gets_a_reason_never_an_exception(name, env):
    missing = registry.backend(name).missing(env)
    works = name.startswith("sdpa_flash") and env.device.type == "cpu" or name in ("sdpa_flash", "sdpa_efficient") and env.hip
    assert (missing is None) if works else missing


@pytest.mark.parametrize("capability", [(5, 2), (7, 0), (7, 5), (8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (13, 0)])
def test_report_6_no_architecture_leaves_a_backend_undecided(capability):
    """The report's UnboundLocalError was an architecture without a branch."""
    everything = dict(sageattention=sage(), sageattn3=SimpleNamespace(sageattn3_blackwell=None), comfy_kitchen=KITCHEN)
    for name, backend in registry.BACKENDS.items():
        verdict = guard(backend, call(37_810), machine(capability, **everything))
        assert verdict.refusal is None or len(verdict.refusal) > 10, name


WHEELS = [
    ("2.10.0+cu130", "13.0", "v2.2.0-windows.post6/sageattention-2.2.0+cu130torch2.10.0andhigher.post6-cp310-abi3-win_amd64.whl"),
    ("2.13.1+cu132", "13.2", "v2.2.0-windows.post6/sageattention-2.2.0+cu130torch2.10.0andhigher.post6-cp310-abi3-win_amd64.whl"),
    ("2.10.1+cu129", "12.9", "v2.2.0-windows.post6/sageattention-2.2.0+cu128torch2.10.0andhigher.post6-cp310-abi3-win_amd64.whl"),
    ("2.9.1+cu128", "12.8", "v2.2.0-windows.post6/sageattention-2.2.0+cu128torch2.9.1.post6-cp310-abi3-win_amd64.whl"),
    ("2.8.0+cu128", "12.8", "v2.2.0-windows.post3/sageattention-2.2.0+cu128torch2.8.0.post3-cp39-abi3-win_amd64.whl"),
    ("2.8.0+cu126", "12.6", None), ("2.7.1+cu128", "12.8", None), ("2.10.0+cpu", None, None),
]  # fmt: skip


@pytest.mark.parametrize(("torch_version", "cuda", "wheel"), WHEELS)
def test_reports_7_8_9_old_sage_on_windows_names_the_wheel(torch_version, cuda, wheel):
    env = Environment(
        CUDA, (8, 9), "GPU", "580", cuda, None, torch_version, (3, 13), "win32", importer(sageattention=sage(new=False)),
        {"sageattention": "1.0.6"}.get)  # fmt: skip
    reason = registry.backend("sage2").missing(env)
    assert "found sageattention 1.0.6, needs 2.2 or newer" in reason and torch_version in reason and "Python 3.13" in reason
    assert "kitchen_int8" in reason, "there is a way without a build"
    found = sage_install.windows_wheel(env)
    assert (found is None) == (wheel is None)
    if wheel is not None:
        assert found.endswith("/" + wheel) and found in reason and "triton-windows" in reason


@pytest.mark.parametrize(("capability", "cuda", "toolkit"), [((8, 9), "12.1", "12.4"), ((12, 0), "13.0", "13.0"), ((9, 0), "12.8", "12.8")])
def test_reports_7_8_9_nothing_installed_on_linux_names_the_build(capability, cuda, toolkit):
    env = Environment(CUDA, capability, "GPU", "580", cuda, None, "2.9.0", (3, 12), "linux", importer(), {}.get)
    reason = registry.backend("sage2").missing(env)
    assert "sageattention is not installed" in reason and f"CUDA toolkit {toolkit}" in reason
    assert f'TORCH_CUDA_ARCH_LIST="{capability[0]}.{capability[1]}"' in reason and "@v2.2.0" in reason


def test_reports_7_8_9_generations_are_told_apart_by_symbols_not_versions():
    both = {"sageattention": "2.2.0"}
    assert "needs 2.2" in registry.backend("sage2").missing(machine(versions=both, sageattention=sage(new=False)))
    assert "choose sage2" in registry.backend("sage1").missing(machine(sageattention=sage()))
    assert registry.backend("sage1").missing(machine(sageattention=sage(new=False))) is None
    assert "compute capability 12.0" in registry.backend("sage1").missing(machine((12, 0), sageattention=sage(new=False)))


@pytest.mark.parametrize("error", [
    TypeError("autotune() got an unexpected keyword argument 'cache_results'"), OSError("DLL load failed while importing _fused"),
    ImportError("undefined symbol: _ZN3c10")], ids=lambda e: type(e).__name__)  # fmt: skip
def test_report_15_a_package_that_breaks_on_import_costs_its_own_backend_only(error):
    env = machine((8, 9), sageattention=error, comfy_kitchen=KITCHEN)
    assert str(error) in registry.backend("sage2").missing(env)
    assert registry.backend("kitchen_int8").missing(env) is None


def test_report_15_a_missing_dependency_is_named():
    env = machine((8, 9), sageattention=ModuleNotFoundError("No module named 'triton'", name="triton"))
    assert "sageattention needs triton" in registry.backend("sage2").missing(env)


def test_old_kitchen_lacks_single_functions():
    assert "0.2.31" in registry.backend("kitchen_int8").missing(machine(comfy_kitchen=SimpleNamespace()))
    old = SimpleNamespace(int8_attention=None, int8_attention_is_available=lambda device: True)
    assert registry.backend("kitchen_int8").missing(machine(comfy_kitchen=old)) is None
    assert "0.2.36" in registry.backend("sol").missing(machine(comfy_kitchen=old))


def test_report_21_22_nothing_here_can_meet_a_core_signature():
    """Core's block and attention signatures grow; this package imports no core and calls none of it."""
    for path in sorted(Path(registry.__file__).parent.glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {name.split(".")[0] for name in names} & {"comfy", "comfy_extras", "comfy_api", "nodes"}, path.name


def test_the_node_lists_every_backend_once():
    assert CHOICES[:2] == ("stock (exact)", "fastest dense") and len(set(CHOICES)) == len(CHOICES)
    assert [b.name for b in registry.automatic()] == [
        "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "kitchen_int8", "sage2", "sage3", "flash_attn2", "flash_attn3", "flash_attn4"]
    for name in CHOICES[2:]:
        assert registry.backend(name).exactness in ("E1", "E2", "E3")
    with pytest.raises(ValueError, match="'sage9' is unknown; there are sdpa_flash"):
        registry.backend("sage9")
    with pytest.raises(ValueError, match="unknown"):
        registry.backend("head_sliced:sage9")

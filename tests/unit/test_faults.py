"""What breaks around the kernels: compilers, libraries, memory, disks, clocks. The work goes on with stock, or stops with a clear error."""

import contextlib
import errno
import logging
import os
import stat
import subprocess
import sys
import time
import types

import pytest
import torch
from h3_vortex.h3 import latent_file
from h3_vortex.kernels import cache, cublaslt, dispatch, gemm_schedule, nvrtc, rules
from h3_vortex.kernels.patch import decide, ops, report, verification
from h3_vortex.tests.unit.test_gemm_schedule import FakeMatmul, data, faked, stock  # noqa: F401  (a fixture and what it stands on)

FILE = "faults.json"


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned_unwritable", set())
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())


# -- compilers and libraries -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch):
    """A driver on which everything works; a test breaks single calls."""
    calls = ("cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuLaunchKernelEx", "cuGetErrorName")
    found = types.SimpleNamespace(**{name: (lambda *args: 0) for name in calls})
    monkeypatch.setattr(nvrtc, "_libraries", lambda: (None, found))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"cubin")
    monkeypatch.setattr(nvrtc, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(nvrtc, "_bind_context", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return found


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction"])
def test_a_kernel_that_the_driver_does_not_load_leaves_the_op_to_the_next_backend(driver, monkeypatch, caplog, call):
    """An old driver refuses newer code; a full GPU has no room for it. Neither may end the run."""
    op = dispatch.Op("fault_load", lambda x: x + 1, ("x",))
    monkeypatch.delitem(dispatch.Op.registry, "fault_load")
    setattr(driver, call, lambda *args: 209)
    plan = dispatch.Planned(lambda x: nvrtc.Kernel("source", "gate", "P", torch.device("cuda", 0)).launch)
    op.add_backend("cuda", plan, dispatch.Constraints(frozenset({"cpu"})))
    x = torch.ones(2)
    with caplog.at_level(logging.WARNING, logger="h3_vortex"):
        assert torch.equal(op(x), x + 1) and torch.equal(op(x), x + 1)
    assert op.choose(x) == "eager"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "kernel gate cannot be loaded" in line and call in line and "209" in line
    with dispatch.use_backend("cuda"), pytest.raises(dispatch.BackendUnavailable, match="cannot be loaded"):
        op(x)


def fake_triton(monkeypatch, version=None, error=None):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "triton" and error is not None:
                raise error
            return None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    if error is None:
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version))
    else:
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    return rules.triton_unavailable_reason.__wrapped__()


@pytest.mark.parametrize("version, reason", [
    ("3.2.0", "needs triton 3.5 or newer (found 3.2.0)"), ("2.1", "needs triton 3.5 or newer (found 2.1)"),
    ("3.5.0", None), ("3.10.1+git1", None), ("4.0.0", None), ("unknown", "needs triton 3.5 or newer (found unknown)"),
])  # fmt: skip
def test_triton_too_old(monkeypatch, version, reason):
    assert fake_triton(monkeypatch, version) == reason


@pytest.mark.parametrize("error", [
    ModuleNotFoundError("No module named 'triton'"), OSError("libtriton.so: invalid ELF header"), RuntimeError("ptxas was not found"),
])  # fmt: skip
def test_triton_missing_or_broken(monkeypatch, error):
    assert fake_triton(monkeypatch, error=error) == f"needs triton, which cannot be imported ({error})"


class CompilationError(Exception):
    """As Triton's own, which is no RuntimeError."""

    __module__ = "triton.compiler.errors"


@pytest.mark.parametrize("error", [
    CompilationError("at 3:4: unknown dtype"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    FileNotFoundError(2, "No such file or directory: 'cl.exe'"),
    RuntimeError("Failed to find Python libs"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    dispatch.BackendUnavailable("NVRTC 13.0 for sm_90a: error"),
])  # fmt: skip
def test_what_fails_in_the_verification_runs_stock_and_is_not_remembered(monkeypatch, caplog, error):
    """Report 81 among them: no Python.h, no compiler on a portable build."""
    monkeypatch.setattr(ops, "backend", lambda *args: ("triton", None))
    monkeypatch.setattr(ops, "run", lambda *args: pytest.fail("an op ran that could not be verified"))

    class Host(decide.Deciding):
        def compare(self, name, args):
            raise error

    host = Host(report.Session("exact", "stock (exact)"), ops.Features(), "digest")
    x = torch.zeros(4, 8)
    rows, table = torch.zeros(4, dtype=torch.int32), torch.zeros(1, 8)
    for _ in range(2):
        assert host._try("gate", x, x, table, rows) is None
    ((op, reason),) = host.calls.stock
    assert op == "gate" and type(error).__name__ in reason and host.calls.stock[op, reason] == 2
    assert len(caplog.records) == 1
    assert not list(cache.cache_dir().glob("**/*.json")), "a passing fault was remembered"


def test_without_nvrtc_and_cublaslt_each_says_what_was_looked_for(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(nvrtc.NvrtcUnavailable, match="needs the NVRTC library that torch ships; tried"):
        nvrtc.load_nvrtc(missing, "linux", "/torch", "13.0")
    with pytest.raises(nvrtc.NvrtcUnavailable, match="needs the NVIDIA driver library libcuda.so.1"):
        nvrtc.load_driver(missing, "linux")
    with pytest.raises(cublaslt.CublasLtUnavailable, match="needs the cuBLASLt library that torch ships; tried"):
        cublaslt.load_library(missing, "linux", "/torch", "13.0")


# -- memory ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["stock", "launch", "timing"])
def test_out_of_memory_in_the_schedule_search_keeps_stock_and_is_not_remembered(faked, monkeypatch, tmp_path, when):  # noqa: F811
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        if when == "launch":
            patch.setattr(FakeMatmul, "run", full)
        elif when == "timing":
            patch.setattr(gemm_schedule, "_timed", full)
        problem = gemm_schedule.Problem("bf16", 4, 8, 16)
        outcome = gemm_schedule.Schedules().prepare("fc2", problem, [data()], full if when == "stock" else stock)
        assert outcome.config is None and outcome.reason == gemm_schedule.OUT_OF_MEMORY
        assert not list(tmp_path.glob("**/*.json"))
    again = gemm_schedule.Schedules().prepare("fc2", problem, [data()], stock)
    assert again.config is not None
    cached = gemm_schedule.Schedules().prepare("fc2", problem, [data()], full)
    assert cached.config is None and cached.reason == gemm_schedule.OUT_OF_MEMORY
    assert gemm_schedule.Schedules().prepare("fc2", problem, [data()], stock).config is not None


# -- disks -----------------------------------------------------------------------------------------------------------------------------


class FullDisk:
    """``os.fdopen`` on a disk that takes ``room`` bytes."""

    def __init__(self, real, room):
        self.real, self.room = real, room

    def __call__(self, handle, mode="r"):
        file = self.real(handle, mode)
        write, disk = file.write, self

        class Limited:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def write(self, data):
                write(data[: disk.room])
                if len(data) > disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")

        return Limited()


@pytest.mark.parametrize("room", [0, 10, 40])
def test_a_full_disk_leaves_the_cache_as_it_was(monkeypatch, caplog, room):
    assert cache.write_bytes("nvrtc", "a", b"before" * 10)
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fdopen", FullDisk(os.fdopen, room))
        assert cache.write_bytes("nvrtc", "a", b"after" * 20) is False
        assert cache.write_bytes("nvrtc", "b", b"after" * 20) is False
    assert cache.read_bytes("nvrtc", "a") == b"before" * 10 and cache.read_bytes("nvrtc", "b") is None
    assert os.listdir(cache.cache_dir() / "nvrtc") == ["a"]
    assert len(caplog.records) == 1 and "No space left on device" in caplog.text


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_leaves_no_half_latent(monkeypatch, tmp_path, room):
    streams = torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8)
    latent_file.save(tmp_path / "a.safetensors", *streams)
    with monkeypatch.context() as patch:
        patch.setattr(latent_file.os, "fdopen", FullDisk(os.fdopen, room))
        for name in ("a", "b"):
            with pytest.raises(OSError, match="No space left"):
                latent_file.save(tmp_path / f"{name}.safetensors", streams[0] + 1, streams[1])
    assert sorted(path.name for path in tmp_path.glob("*.safetensors*")) == ["a.safetensors"]
    assert torch.equal(latent_file.load(tmp_path / "a.safetensors")[0], streams[0])


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path):
    program = (
        "import importlib.util, os, signal, sys\n"
        f"spec = importlib.util.spec_from_file_location('cache', {cache.__file__!r})\n"
        "cache = importlib.util.module_from_spec(spec); spec.loader.exec_module(cache)\n"
        "cache.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.write_bytes('nvrtc', 'a', b'x' * 100000)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    folder = cache.cache_dir() / "nvrtc"
    assert [name.endswith(".part") for name in os.listdir(folder)] == [True]
    assert cache.read_bytes("nvrtc", "a") is None
    assert cache.write_bytes("nvrtc", "a", b"whole") and cache.read_bytes("nvrtc", "a") == b"whole"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser writes into read-only folders")
def test_a_read_only_folder(caplog):
    cache.write_bytes("nvrtc", "a", b"x")
    folder = cache.cache_dir() / "nvrtc"
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert cache.write_bytes("nvrtc", "b", b"y") is False and cache.read_bytes("nvrtc", "a") == b"x"
    finally:
        folder.chmod(stat.S_IRWXU)
    assert "cannot be written" in caplog.text


def test_a_read_only_file_system(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache.Path, "mkdir", refuse)
    assert cache.write_bytes("nvrtc", "a", b"x") is False and cache.read_bytes("nvrtc", "a") is None
    assert len(caplog.records) == 1 and "Read-only file system" in caplog.text


def test_a_user_without_a_home(monkeypatch, caplog):
    """Containers run as a user that the system does not know."""

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("H3_VORTEX_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", nowhere)
    assert cache.read_bytes("nvrtc", "a") is None and cache.write_json("verdicts", "a", 1, {}) is False
    assert len(caplog.records) == 1 and "set H3_VORTEX_CACHE" in caplog.text
    assert verification.settle("case", FILE, lambda: ([torch.ones(1)], [torch.ones(1)])).equal


# -- clocks ----------------------------------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_backwards(monkeypatch, faked, caplog):  # noqa: F811
    """Times of day decide nothing: durations come from monotonic clocks, and what the cache holds has no age."""
    day = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(day)))
    problem = gemm_schedule.Problem("bf16", 4, 8, 16)
    outcome = gemm_schedule.Schedules().prepare("fc2", problem, [data()], stock)
    assert outcome.config is not None and 0 <= outcome.seconds < 60
    session = report.Session("exact", "stock (exact)")
    with report.timed_run(session):
        pass
    assert report.status()["last_run"]["seconds"] >= 0
    path = next((cache.cache_dir().parent).glob("**/gemm/*.json"))
    os.utime(path, (2**31, 2**31))  # written by a clock that was ahead
    again = gemm_schedule.Schedules().prepare("fc2", problem, [data()], stock)
    assert "cached, verified" in again.reason

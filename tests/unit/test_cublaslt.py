"""cuBLASLt loader and structs: what can be tested without a GPU."""

import contextlib
import ctypes
import threading
import time

import pytest
import torch
from h3_vortex.kernels import cublaslt


class FakeFunction:
    argtypes = restype = None


class FakeLibrary:
    def __init__(self, missing=()):
        for name in cublaslt._prototypes():
            if name not in missing:
                setattr(self, name, FakeFunction())


def test_struct_sizes_are_those_of_the_header():
    assert ctypes.sizeof(cublaslt._Algo) == 64
    assert ctypes.sizeof(cublaslt._Heuristic) == 96


def test_windows_names():
    names = cublaslt.candidate_libraries("win32", r"C:\py\torch", "13.0")
    assert [n.replace("/", "\\").rsplit("\\", 1)[-1] for n in names] == ["cublasLt64_13.dll", "cublasLt64_13.dll"]
    assert names[0].startswith(r"C:\py\torch")
    assert cublaslt.candidate_libraries("win32", r"C:\py\torch", "12.8")[-1] == "cublasLt64_12.dll"


def test_linux_prefers_the_copy_torch_already_mapped(tmp_path):
    package = tmp_path / "nvidia" / "cu13" / "lib"
    package.mkdir(parents=True)
    (package / "libcublasLt.so.13").touch()
    mapped = "7f00-7f01 r-xp 0 0:0 1   /elsewhere/libcublasLt.so.13\n7f02-7f03 r-xp 0 0:0 1   /elsewhere/libcublasLt.so.12\n"
    names = cublaslt.candidate_libraries("linux", str(tmp_path / "torch"), "13.0", mapped)
    assert names[0] == "/elsewhere/libcublasLt.so.13"
    assert names[1] == str(package / "libcublasLt.so.13")
    assert names[-1] == "libcublasLt.so.13"


def test_every_function_gets_its_argument_types():
    library = cublaslt.load_library(load=lambda name: FakeLibrary(), platform="win32", torch_dir="t", cuda_version="13.0")
    assert all(getattr(library, name).argtypes is not None for name in cublaslt._prototypes())


def test_missing_library_and_missing_symbol_are_named():
    def absent(name):
        raise OSError(name)

    with pytest.raises(cublaslt.CublasLtUnavailable, match=r"cublasLt64_13\.dll \(not found\)"):
        cublaslt.load_library(load=absent, platform="win32", torch_dir="t", cuda_version="13.0")
    with pytest.raises(cublaslt.CublasLtUnavailable, match="cublasLtMatmulAlgoInit"):
        cublaslt.load_library(
            load=lambda name: FakeLibrary(missing=("cublasLtMatmulAlgoInit",)), platform="win32", torch_dir="t", cuda_version="13.0")


def test_a_cpu_build_of_torch_is_named(monkeypatch):
    monkeypatch.setattr(cublaslt.torch.version, "cuda", None)
    with pytest.raises(cublaslt.CublasLtUnavailable, match="CUDA build of torch"):
        cublaslt.load_library(load=lambda name: FakeLibrary())


def test_error_names_the_status():
    error = cublaslt.CublasLtError("heuristic for nvfp4 1x2x3", 15)
    assert "NOT_SUPPORTED (15)" in str(error) and "nvfp4 1x2x3" in str(error) and error.status == 15


class CountingLibrary:
    """Descriptors as far as scales go: a launch notes the scale pointer that its descriptor holds at that moment, a little later."""

    def __init__(self):
        self.scale, self.launched = None, []

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):
        if attribute == cublaslt.DescAttribute.B_SCALE_POINTER:
            self.scale = ctypes.cast(value, ctypes.POINTER(ctypes.c_void_p))[0]
            time.sleep(0.001)
        return 0

    def cublasLtMatmul(self, *arguments):
        self.launched.append((arguments[5], self.scale))
        return 0

    def __getattr__(self, name):
        return lambda *arguments: 0


def test_threads_that_share_a_matmul_keep_their_own_scales(monkeypatch):
    library = CountingLibrary()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_handle", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    matmul = cublaslt.Matmul(cublaslt.Problem("fp8", 2, 2, 2), torch.device("cuda", 0))
    algorithm = cublaslt.Algorithm(cublaslt._Algo(), None, 0)

    def work(x, scale):
        for _ in range(20):
            matmul.run(algorithm, x, x, x, x_scale=scale, w_scale=scale)

    pairs = [(torch.zeros(2), torch.zeros(1)) for _ in range(3)]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launched) == 60
    assert set(library.launched) == {(x.data_ptr(), scale.data_ptr()) for x, scale in pairs}

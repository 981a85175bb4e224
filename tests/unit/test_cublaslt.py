"""cuBLASLt loader and structs: what can be tested without a GPU."""

import ctypes

import pytest
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

"""Finding NVRTC and the driver on Linux and Windows, compiling and caching, with stand-ins for both libraries."""

import contextlib
import ctypes
import os
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels import dispatch, nvrtc


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path / "cache"))


class Loader:
    """Stands in for ``ctypes.CDLL``: loads the names in ``present`` (by file name), remembers what was asked for."""

    def __init__(self, *present, symbols=("nvrtcCreateProgram",)):
        self.present, self.symbols, self.asked = present, symbols, []

    def __call__(self, name):
        self.asked.append(name)
        if os.path.basename(name.replace("\\", "/")) not in self.present:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(name=name, **{symbol: object() for symbol in self.symbols})


@pytest.mark.parametrize("cuda, present", [
    ("13.0", "nvrtc64_130_0.dll"), ("12.8", "nvrtc64_120_0.dll"), ("12.6", "nvrtc64_126_0.dll"), ("11.8", "nvrtc64_118_0.dll"),
])  # fmt: skip
def test_windows_names(cuda, present):
    loader = Loader(present)
    found = nvrtc.load_nvrtc(loader, "win32", "C:/torch", cuda)
    assert os.path.basename(found.name) == present and found.name.startswith("C:/torch")
    assert len(set(loader.asked)) == len(loader.asked)


def test_linux_takes_what_torch_mapped():
    loader = Loader("libcaffe2_nvrtc.so", "libnvrtc.so.13")
    assert os.path.basename(nvrtc.load_nvrtc(loader, "linux", "/site/torch", "13.0").name) == "libcaffe2_nvrtc.so"
    assert os.path.basename(nvrtc.load_nvrtc(Loader("libnvrtc.so.12"), "linux", "/site/torch", "12.8").name) == "libnvrtc.so.12"


@pytest.mark.parametrize("folder", ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"])
def test_linux_loads_the_builtins_before_nvrtc(tmp_path, folder):
    """NVRTC has no RPATH: loaded by path alone it cannot open its builtins later."""
    lib = tmp_path / folder
    lib.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc-builtins.alt.so.13.0"):
        (lib / name).touch()
    asked = []

    def load(name):  # only full paths work: nothing is mapped yet
        asked.append(name)
        if os.path.dirname(name) != str(lib) or "caffe2" in name:
            raise OSError(name)
        return SimpleNamespace(name=name, nvrtcCreateProgram=object())

    found = nvrtc.load_nvrtc(load, "linux", str(tmp_path / "torch"), "13.0")
    assert found.name == str(lib / "libnvrtc.so.13")
    assert [os.path.basename(n) for n in asked[-2:]] == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]


def test_missing_builtins_are_not_fatal_to_another_way(tmp_path):
    """A folder with NVRTC but no builtins is tried as it is; the loader's refusal moves on and is reported."""
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    (lib / "libnvrtc.so.13").touch()

    def load(name):
        raise OSError("libnvrtc-builtins.so.13.0: cannot open shared object file")

    with pytest.raises(nvrtc.NvrtcUnavailable, match=r"needs the NVRTC library that torch ships; tried libcaffe2_nvrtc.so \(OSError\)"):
        nvrtc.load_nvrtc(load, "linux", str(tmp_path / "torch"), "13.0")


def test_a_library_without_the_symbol_is_passed_over():
    def load(name):
        return SimpleNamespace(name=name) if "caffe2" in name else SimpleNamespace(name=name, nvrtcCreateProgram=object())

    assert nvrtc.load_nvrtc(load, "linux", "/site/torch", "13.0").name == "libnvrtc.so.13"


def test_everything_missing_names_what_was_tried():
    with pytest.raises(nvrtc.NvrtcUnavailable) as error:
        nvrtc.load_nvrtc(Loader(), "win32", "C:/torch", "13.0")
    assert "nvrtc64_130_0.dll (OSError)" in str(error.value)
    assert isinstance(error.value, dispatch.BackendUnavailable)


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(nvrtc.NvrtcUnavailable, match="needs a CUDA build of torch"):
        nvrtc.load_nvrtc(Loader())


@pytest.mark.parametrize("platform, name", [("linux", "libcuda.so.1"), ("win32", "nvcuda.dll")])
def test_driver_missing_or_too_old(platform, name):
    with pytest.raises(nvrtc.NvrtcUnavailable, match=f"needs the NVIDIA driver library {name} of CUDA 12 or newer"):
        nvrtc.load_driver(Loader(), platform)
    with pytest.raises(nvrtc.NvrtcUnavailable, match=r"CUDA 12 or newer \(AttributeError"):
        nvrtc.load_driver(Loader(name, symbols=("cuLaunchKernelEx",)), platform)


def test_reason_without_a_gpu(monkeypatch):
    nvrtc.unavailable_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nvrtc.unavailable_reason() == "needs an NVIDIA GPU that torch can use"
    nvrtc.unavailable_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    assert "ROCm" in nvrtc.unavailable_reason()
    nvrtc.unavailable_reason.cache_clear()


def test_reason_without_nvrtc(monkeypatch):
    nvrtc.unavailable_reason.cache_clear()

    def libraries():
        raise nvrtc.NvrtcUnavailable("needs the NVRTC library that torch ships; tried nothing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(nvrtc, "_libraries", libraries)
    assert nvrtc.unavailable_reason().startswith("needs the NVRTC library")
    nvrtc.unavailable_reason.cache_clear()


class Compiler:
    """Stands in for libnvrtc: 'compiles' by echoing the source, or fails with a log."""

    def __init__(self, log=None):
        self.log, self.compiled, self.alive = log, [], 0

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, program, text, *_):
        self.text, self.alive = text, self.alive + 1
        return 0

    def nvrtcCompileProgram(self, program, count, flags):
        self.compiled.append([flags[i] for i in range(count)])
        return 6 if self.log else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program, buffer):
        buffer.value = self.log
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(self.text)
        return 0

    def nvrtcGetCUBIN(self, program, buffer):
        ctypes.memmove(buffer, self.text, len(self.text))
        return 0

    def nvrtcDestroyProgram(self, program):
        self.alive -= 1
        return 0


@pytest.fixture
def compiler(monkeypatch):
    nvrtc.nvrtc_version.cache_clear()
    made = Compiler()
    monkeypatch.setattr(nvrtc, "_libraries", lambda: (made, None))
    yield made
    nvrtc.nvrtc_version.cache_clear()


def test_compiling_goes_through_the_cache(compiler):
    assert nvrtc.compile_source("source a", "sm_90a", ("--ftz=true",)) == b"source a"
    assert nvrtc.compile_source("source a", "sm_90a", ("--ftz=true",)) == b"source a"
    assert len(compiler.compiled) == 1 and compiler.alive == 0
    assert compiler.compiled[0][0] == b"--gpu-architecture=sm_90a" and b"--ftz=true" in compiler.compiled[0]
    for other in (("source b", "sm_90a", ("--ftz=true",)), ("source a", "sm_80", ("--ftz=true",)), ("source a", "sm_90a", ())):
        nvrtc.compile_source(*other)
    assert len(compiler.compiled) == 4


def test_a_damaged_cache_file_is_compiled_anew(compiler, tmp_path):
    nvrtc.compile_source("source a", "sm_90a")
    (file,) = (tmp_path / "cache" / "nvrtc").iterdir()
    file.write_bytes(b"junk")
    assert nvrtc.compile_source("source a", "sm_90a") == b"source a" and len(compiler.compiled) == 2


def test_a_compile_error_carries_the_log_and_frees_the_program(compiler):
    compiler.log = b"h3_vortex.cu(3): error: identifier is undefined"
    with pytest.raises(nvrtc.CompileError, match=r"NVRTC 13.0 for sm_999: h3_vortex.cu\(3\): error: identifier"):
        nvrtc.compile_source("source", "sm_999")
    assert compiler.alive == 0


@pytest.mark.parametrize("capability, arch", [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((12, 1), "sm_121a")])
def test_architecture(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert nvrtc.architecture(torch.device("cuda", 0)) == arch


@pytest.mark.parametrize("name", sorted(path.stem for path in nvrtc.CSRC.glob("*.cu")))
def test_sources_need_no_header(name):
    """There is no include path on a user's machine: after the pack's own files are put in, no include may be left."""
    text = nvrtc.source(name)
    assert "#include" not in text and 'extern "C" __global__' in text


class Driver:
    """Stands in for libcuda: hands out handles, keeps the packed parameters of each launch."""

    def __init__(self, current=1, code=0):
        self.current, self.code, self.launches, self.bound = current, code, [], []

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.current
        return 0

    def cuDevicePrimaryCtxRetain(self, context, index):
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context):
        self.bound.append(context.value)
        self.current = context.value
        return 0

    def cuLibraryLoadData(self, library, cubin, *_):
        library._obj.value = 5
        return 0

    def cuLibraryGetKernel(self, kernel, library, name):
        kernel._obj.value = 6
        return 0

    def cuKernelGetFunction(self, function, kernel):
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuLaunchKernelEx(self, config, kernel, params, extra):
        grid_block, stream, attributes = ctypes.string_at(config.value, 28), *struct.unpack("<QQ", ctypes.string_at(config.value + 32, 16))
        fields = (ctypes.c_void_p * 5).from_address(extra.value)
        size = ctypes.c_size_t.from_address(fields[3]).value
        assert (fields[0], fields[2], fields[4], params, attributes) == (1, 2, None, None, 0)
        assert ctypes.c_uint.from_address(config.value + 48).value == 0  # no attributes
        self.launches.append((kernel.value, *struct.unpack("<7I", grid_block), stream, ctypes.string_at(fields[1], size)))
        return self.code


@pytest.fixture
def driver(monkeypatch, compiler):
    made = Driver()
    monkeypatch.setattr(nvrtc, "_libraries", lambda: (compiler, made))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1234, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    nvrtc._primary_context.cache_clear()
    yield made
    nvrtc._primary_context.cache_clear()


def test_launch_packs_the_parameters_as_the_kernel_expects(driver):
    kernel = nvrtc.Kernel("source", "k", "Piqf", torch.device("cuda", 0))
    kernel.launch(3, 64, 0x1122334455667788, 7, -1, 0.5, shared=16)
    (launch,) = driver.launches
    assert launch[:9] == (6, 3, 1, 1, 64, 1, 1, 16, 1234)
    # natural alignment: pointer at 0, int at 8, long long at 16, float at 24
    assert launch[9] == struct.pack("<Qi4xqf", 0x1122334455667788, 7, -1, 0.5)
    kernel.launch(1, 32, 1, 2, 3, 4.0)
    assert driver.launches[1][9] == struct.pack("<Qi4xqf", 1, 2, 3, 4.0)


def test_a_thread_without_a_context_gets_torchs(driver):
    driver.current = None
    kernel = nvrtc.Kernel("source", "k", "P", torch.device("cuda", 0))
    assert driver.bound == [77]
    kernel.launch(1, 32, 0)
    assert driver.bound == [77]


def test_a_launch_on_another_device_leaves_the_threads_own(driver, monkeypatch):
    """A new thread whose device is 0 launches on device 1 first: binding that context for good would make 1 its device."""

    @contextlib.contextmanager
    def device(index):
        before, driver.current = driver.current, index + 1  # as cudaSetDevice: context n + 1 is that of device n
        yield
        driver.current = before

    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = nvrtc.Kernel("source", "k", "P", torch.device("cuda", 1))
    for current in (None, 1):
        driver.current = current
        thread = threading.Thread(target=kernel.launch, args=(1, 32, 0))
        thread.start()
        thread.join()
        assert driver.current == current
    assert len(driver.launches) == 2


def test_a_refused_launch_names_the_error_and_the_kernel(driver):
    kernel = nvrtc.Kernel("source", "swiglu", "P", torch.device("cuda", 0))
    driver.code = 1
    with pytest.raises(RuntimeError, match=r"CUDA driver: CUDA_ERROR_INVALID_VALUE \(1\) in kernel swiglu"):
        kernel.launch(0, 32, 0)


def test_kernel_is_compiled_once_per_set_of_defines(driver, compiler):
    nvrtc.kernel.cache_clear()
    a = nvrtc.kernel("swiglu", "PPq", 0, F=64, THREADS=64, VECTORS=2)
    assert nvrtc.kernel("swiglu", "PPq", 0, F=64, THREADS=64, VECTORS=2) is a
    assert nvrtc.kernel("swiglu", "PPq", 0, F=True, THREADS=64, VECTORS=2) is not a
    assert compiler.text.startswith(b"#define F 1\n#define THREADS 64\n#define VECTORS 2\n")
    nvrtc.kernel.cache_clear()

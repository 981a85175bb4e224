"""CUDA C++ compiled at run time by the NVRTC that torch ships, launched through the driver. No nvcc, no compiler, no Triton.

Why ctypes: ``torch.cuda._compile_kernel`` is private and raises without a CUDA toolkit, and ``cuda.bindings`` comes with torch
on Linux only. Here a launch costs two ``struct.pack_into`` and one ``cuLaunchKernelEx`` with a packed parameter buffer; that call
takes four prepared pointers, where each of the eleven arguments of ``cuLaunchKernel`` would be converted anew.

Compiled code is cached on disk under the hash of source, options, architecture and NVRTC version (:mod:`.cache`).
"""

import ctypes
import functools
import glob
import os
import struct
import sys
import threading
from pathlib import Path

import torch

from . import cache
from .dispatch import BackendUnavailable

CSRC = Path(__file__).resolve().parent.parent / "csrc"
_LAUNCH_PARAM_BUFFER_POINTER, _LAUNCH_PARAM_BUFFER_SIZE, _LAUNCH_PARAM_END = 1, 2, 0
_CONFIG = struct.Struct("@7IP")  # CUlaunchConfig: grid, block, shared bytes, stream; then attributes (pointer, count), which stay zero
_CONFIG_BYTES = 56


class NvrtcUnavailable(BackendUnavailable):
    """NVRTC or the CUDA driver cannot be used here; the message says what was looked for."""


class CompileError(BackendUnavailable):
    """NVRTC rejected a source; the message carries its log."""


class LoadError(BackendUnavailable):
    """The driver does not load a compiled kernel: it is too old for it, or out of memory."""


def candidate_libraries(platform: str, torch_dir: str, cuda_version: str) -> list[tuple[str, ...]]:
    """Ways to load NVRTC, best first; each is a sequence of libraries to load in order, the last one being NVRTC itself.

    On Linux ``import torch`` has already mapped NVRTC, and ``libcaffe2_nvrtc.so`` resolves it through its RPATH; loading the file
    alone needs its builtins library first (NVRTC has no RPATH of its own).
    """
    major, minor = (cuda_version.split(".") + ["0"])[:2]
    if platform == "win32":
        lib = os.path.join(torch_dir, "lib")
        names = (f"nvrtc64_{major}0_0.dll", f"nvrtc64_{major}{minor}_0.dll")
        return [*((os.path.join(lib, name),) for name in dict.fromkeys(names)), (names[0],)]
    ways: list[tuple[str, ...]] = [(os.path.join(torch_dir, "lib", "libcaffe2_nvrtc.so"),), (f"libnvrtc.so.{major}",)]
    site = os.path.dirname(torch_dir)
    for parts in ((site, "nvidia", f"cu{major}", "lib"), (site, "nvidia", "cuda_nvrtc", "lib"), (torch_dir, "lib")):
        folder = os.path.join(*parts)
        found = [p for p in sorted(glob.glob(os.path.join(folder, "libnvrtc*.so*"))) if ".alt." not in os.path.basename(p)]
        builtins = [p for p in found if "builtins" in os.path.basename(p)]
        libraries = [p for p in found if p not in builtins]
        ways += [(*builtins[:1], library) for library in libraries[:1]]
    return ways


def load_nvrtc(load=ctypes.CDLL, platform: str = sys.platform, torch_dir: str | None = None, cuda_version: str | None = None):
    """The NVRTC library. ``load`` stands in for ``ctypes.CDLL`` in tests. Raises :class:`NvrtcUnavailable` with every name tried."""
    torch_dir = torch_dir or os.path.dirname(torch.__file__)
    cuda_version = cuda_version or torch.version.cuda
    if not cuda_version:
        raise NvrtcUnavailable("needs a CUDA build of torch (this one has none)")
    tried = []
    for way in candidate_libraries(platform, torch_dir, cuda_version):
        try:
            for name in way:
                library = load(name)
            library.nvrtcCreateProgram  # noqa: B018  (raises AttributeError when the library lacks the symbol)
            return library
        except (OSError, AttributeError) as error:
            tried.append(f"{os.path.basename(way[-1])} ({type(error).__name__})")
    raise NvrtcUnavailable("needs the NVRTC library that torch ships; tried " + ", ".join(tried))


def load_driver(load=ctypes.CDLL, platform: str = sys.platform):
    """The CUDA driver with the library API (CUDA 12 or newer). Raises :class:`NvrtcUnavailable`."""
    name = "nvcuda.dll" if platform == "win32" else "libcuda.so.1"
    try:
        driver = load(name)
        driver.cuLibraryLoadData  # noqa: B018
        driver.cuLaunchKernelEx  # noqa: B018
    except (OSError, AttributeError) as error:
        raise NvrtcUnavailable(f"needs the NVIDIA driver library {name} of CUDA 12 or newer ({type(error).__name__}: {error})") from error
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    driver.cuLibraryLoadData.argtypes = [pointer, pointer, pointer, pointer, unsigned, pointer, pointer, unsigned]
    driver.cuLibraryGetKernel.argtypes = [pointer, pointer, ctypes.c_char_p]
    driver.cuKernelGetFunction.argtypes = [pointer, pointer]
    driver.cuCtxGetCurrent.argtypes = [pointer]
    driver.cuCtxSetCurrent.argtypes = [pointer]
    driver.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return driver


@functools.cache
def _libraries():
    return load_nvrtc(), load_driver()


@functools.cache
def unavailable_reason() -> str | None:
    """None when kernels can be compiled and launched on this machine, else why not (answers once per process)."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use"
    if torch.version.hip:
        return "needs an NVIDIA GPU (this torch is built for ROCm)"
    try:
        _libraries()
    except NvrtcUnavailable as error:
        return str(error)
    return None


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version (``580.82.07``) from NVML, or "unknown" where there is no NVML."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2():
            return "unknown"
        failed = nvml.nvmlSystemGetDriverVersion(text, len(text))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return "unknown"
    return "unknown" if failed else text.value.decode(errors="replace")


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check_nvrtc(_libraries()[0].nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


@functools.cache
def source(name: str) -> str:
    """``csrc/<name>.cu`` with its ``#include "x.cuh"`` lines replaced by those files (NVRTC has no include path here)."""
    lines = []
    for line in (CSRC / f"{name}.cu").read_text(encoding="utf-8").splitlines():
        stripped = line.strip()
        if stripped.startswith('#include "'):
            lines.append((CSRC / stripped.split('"')[1]).read_text(encoding="utf-8"))
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _check_nvrtc(code: int, what: str) -> None:
    if code:
        raise NvrtcUnavailable(f"{what} failed with NVRTC error {code}")


def _check_driver(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _libraries()[1].cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"CUDA driver: {(name.value or b'error').decode()} ({code}) in {what}")


@functools.cache
def _primary_context(index: int):
    """The context torch uses on device ``index``. Retained once and for the life of the process, as torch itself does."""
    context = ctypes.c_void_p()
    _check_driver(_libraries()[1].cuDevicePrimaryCtxRetain(ctypes.byref(context), index), f"cuDevicePrimaryCtxRetain({index})")
    return context


def _bind_context(index: int) -> None:
    """Give this thread a current context: a new thread has none until the CUDA runtime is used in it, and a driver launch is not that."""
    driver = _libraries()[1]
    current = ctypes.c_void_p()
    _check_driver(driver.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    if not current.value:
        _check_driver(driver.cuCtxSetCurrent(_primary_context(index)), "cuCtxSetCurrent")


def compile_source(text: str, arch: str, options: tuple[str, ...] = ()) -> bytes:
    """The cubin of a CUDA C++ source for ``arch`` (``sm_90``), from the disk cache when it is there."""
    key = cache.digest(text, arch, *options, nvrtc_version()) + ".cubin"
    cubin = cache.read_bytes("nvrtc", key)
    if cubin is not None:
        return cubin
    nvrtc = _libraries()[0]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"h3_vortex.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        flags = [f"--gpu-architecture={arch}".encode(), b"--diag-suppress=177", *(o.encode() for o in options)]
        if nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags)):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            text_log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, text_log)
            raise CompileError(f"NVRTC {'.'.join(map(str, nvrtc_version()))} for {arch}: {text_log.value.decode(errors='replace').strip()}")
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        buffer = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, buffer), "nvrtcGetCUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    cache.write_bytes("nvrtc", key, buffer.raw)
    return buffer.raw


def architecture(device: torch.device) -> str:
    """The target NVRTC compiles for: the exact chip, so that its instructions (bf16 arithmetic, E2M1 conversion) can be used."""
    major, minor = torch.cuda.get_device_capability(device)
    suffix = "a" if (major, minor) >= (9, 0) else ""
    return f"sm_{major}{minor}{suffix}"


class Kernel:
    """One compiled entry point for one device.

    Args:
        text: CUDA C++ source; ``entry``: its ``extern "C"`` function.
        parameters: ``struct`` format of the parameter list in native alignment (``P`` pointer, ``q`` int64, ``i`` int32, ``f`` float).
        device: where it runs. ``options``: NVRTC flags.

    The cubin is not tied to a context; launches go to the device's current stream and allocate nothing, so they may be
    captured. Make a Kernel outside of graph capture.
    """

    def __init__(self, text: str, entry: str, parameters: str, device: torch.device, options: tuple[str, ...] = ()):
        driver = _libraries()[1]
        self.entry = entry
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self._cubin = compile_source(text, architecture(device), options)
        library, kernel, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self.index):
            _bind_context(self.index)
            try:
                code = driver.cuLibraryLoadData(ctypes.byref(library), self._cubin, None, None, 0, None, None, 0)
                _check_driver(code, "cuLibraryLoadData")
                _check_driver(driver.cuLibraryGetKernel(ctypes.byref(kernel), library, entry.encode()), "cuLibraryGetKernel")
                # loads the code now: lazily it would happen at the first launch, which may be under graph capture
                _check_driver(driver.cuKernelGetFunction(ctypes.byref(function), kernel), "cuKernelGetFunction")
            except RuntimeError as error:
                raise LoadError(f"kernel {entry} cannot be loaded: {error}") from error
        self._kernel = kernel
        self._launch = driver.cuLaunchKernelEx
        self._stream, self._device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
        self._layout = struct.Struct("@" + parameters)
        self._local = threading.local()  # buffers per thread: two threads may launch at once

    def _prepare(self):
        with torch.cuda.device(self.index):  # binds and goes back: the current device of a thread is its owner's affair
            _bind_context(self.index)
        parameters, config = ctypes.create_string_buffer(self._layout.size), ctypes.create_string_buffer(_CONFIG_BYTES)
        size = ctypes.c_size_t(self._layout.size)
        extra = (ctypes.c_void_p * 5)(
            _LAUNCH_PARAM_BUFFER_POINTER, ctypes.addressof(parameters),
            _LAUNCH_PARAM_BUFFER_SIZE, ctypes.addressof(size), _LAUNCH_PARAM_END)
        arguments = ctypes.c_void_p(ctypes.addressof(config)), self._kernel, None, ctypes.c_void_p(ctypes.addressof(extra))
        self._local.state = parameters, config, arguments, (size, extra)  # the last two are only kept alive
        return self._local.state

    def launch(self, grid: int, block: int, *values, shared: int = 0) -> None:
        """Launch ``grid`` blocks of ``block`` threads on the device's current stream."""
        parameters, config, arguments, _ = getattr(self._local, "state", None) or self._prepare()
        index = self.index
        self._layout.pack_into(parameters, 0, *values)
        _CONFIG.pack_into(config, 0, grid, 1, 1, block, 1, 1, shared, self._stream(index))
        if self._device() == index:
            code = self._launch(*arguments)
        else:
            with torch.cuda.device(index):
                code = self._launch(*arguments)
        if code:
            _check_driver(code, f"kernel {self.entry}")


@functools.cache
def kernel(name: str, parameters: str, index: int, options: tuple[str, ...] = (), **defines: int) -> Kernel:
    """``csrc/<name>.cu`` with ``defines`` in front, its entry point of the same name, on CUDA device ``index``; once per process."""
    prelude = "".join(f"#define {key} {int(value)}\n" for key, value in sorted(defines.items()))
    return Kernel(prelude + source(name), name, parameters, torch.device("cuda", index), options)

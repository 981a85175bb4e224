"""cuBLASLt through ctypes: enumerate, build, check and run one fixed matmul algorithm.

The library is the one torch has already loaded, so nothing is compiled or installed. Numbers in the enums are those of
``cublasLt.h`` 13.1 (``nvidia-cublas``); they are part of cuBLASLt's stable ABI.

Row-major ``y[M, N] = x[M, K] @ w[N, K].T`` is column-major ``D[N, M] = op(A) B`` with ``A = w`` seen as ``[K, N]`` and transposed, and
``B = x`` seen as ``[K, M]``: the "TN" form, the only one FP8 and FP4 tensor cores offer, used for every type here.

What was measured on an H200 and shapes this module: rebuilding an algorithm needs all nine configuration values, the custom option
included; a changed split-K changes bits, a changed tile or cluster did not; the heuristic itself is the capability probe (it answers
NOT_SUPPORTED for NVFP4 before Blackwell).
"""

import ctypes
import functools
import glob
import os
import sys
import threading
from dataclasses import asdict, dataclass
from enum import IntEnum

import torch

STATUS = {
    0: "SUCCESS", 1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}


class CublasLtUnavailable(RuntimeError):
    """The library cannot be loaded or lacks a function; the message says what was tried."""


class CublasLtError(RuntimeError):
    """A cuBLASLt call failed; carries the status name and what was asked for."""

    def __init__(self, what: str, status: int):
        super().__init__(f"cuBLASLt {what}: {STATUS.get(status, 'status')} ({status})")
        self.status = status


class DataType(IntEnum):  # cudaDataType_t
    R_32F = 0
    R_16F = 2
    R_16BF = 14
    R_8F_E4M3 = 28
    R_4F_E2M1 = 33


class DescAttribute(IntEnum):  # cublasLtMatmulDescAttributes_t
    POINTER_MODE = 2
    TRANSA = 3
    A_SCALE_POINTER = 17
    B_SCALE_POINTER = 18
    FAST_ACCUM = 25
    A_SCALE_MODE = 31
    B_SCALE_MODE = 32


class PreferenceAttribute(IntEnum):  # cublasLtMatmulPreferenceAttributes_t
    MAX_WORKSPACE_BYTES = 1


class Capability(IntEnum):  # cublasLtMatmulAlgoCapAttributes_t
    TILE_IDS = 6
    STAGES_IDS = 13


COMPUTE_32F = 68
OP_TRANSPOSE = 1
POINTER_MODE_DEVICE = 1
SCALE_MODE_VEC16_UE4M3 = 1


class _Algo(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", _Algo), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class Config:
    """The nine values that identify an algorithm within one library version (``cublasLtMatmulAlgoConfigAttributes_t`` 0..8)."""

    id: int
    tile: int
    split_k: int
    reduction: int
    swizzle: int
    custom: int
    stages: int
    inner_shape: int
    cluster: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


_CONFIG_TYPES = {
    "id": (0, ctypes.c_int32), "tile": (1, ctypes.c_uint32), "split_k": (2, ctypes.c_int32), "reduction": (3, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32), "custom": (5, ctypes.c_uint32), "stages": (6, ctypes.c_uint32),
    "inner_shape": (7, ctypes.c_uint16), "cluster": (8, ctypes.c_uint16),
}


@dataclass(frozen=True)
class Problem:
    """``y[m, n] = x[m, k] @ w[n, k].T`` with bf16 or fp16 output.

    kind: ``bf16`` / ``fp16`` (plain), ``fp8`` (E4M3 operands, one fp32 scale each), ``nvfp4`` (E2M1 operands packed two a byte, E4M3
    block scales of 16 in cuBLAS' 32x4x4 order, alpha = product of the tensor scales).
    """

    kind: str
    m: int
    n: int
    k: int
    out: str = "bf16"

    def __str__(self):
        return f"{self.kind} {self.m}x{self.n}x{self.k}"


_OPERAND = {"bf16": DataType.R_16BF, "fp16": DataType.R_16F, "fp8": DataType.R_8F_E4M3, "nvfp4": DataType.R_4F_E2M1}


def candidate_libraries(platform: str, torch_dir: str, cuda_version: str, mapped: str = "") -> list[str]:
    """Names to try, best first. ``mapped`` is the text of ``/proc/self/maps`` on Linux: the copy torch already uses comes first."""
    major = cuda_version.split(".")[0]
    if platform == "win32":
        name = f"cublasLt64_{major}.dll"
        return [os.path.join(torch_dir, "lib", name), name]
    loaded = sorted({line.split()[-1] for line in mapped.splitlines() if f"libcublasLt.so.{major}" in line})
    site = os.path.dirname(torch_dir)
    packages = os.path.join(site, "nvidia")
    folders = [os.path.join(packages, f"cu{major}", "lib"), os.path.join(packages, "cublas", "lib"), os.path.join(torch_dir, "lib")]
    files = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, f"libcublasLt.so.{major}*")))]
    return [*loaded, *files, f"libcublasLt.so.{major}"]


def _prototypes():
    """Every function used, with its argument types: without them 64-bit pointers are cut to 32 bits on Windows."""
    p, i, size, out = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.POINTER
    algo, result = out(_Algo), out(_Heuristic)
    types = [i] * 6
    return {
        "cublasLtGetVersion": ([], size),
        "cublasLtCreate": ([out(p)], i),
        "cublasLtMatmulDescCreate": ([out(p), i, i], i),
        "cublasLtMatmulDescDestroy": ([p], i),
        "cublasLtMatmulDescSetAttribute": ([p, i, p, size], i),
        "cublasLtMatrixLayoutCreate": ([out(p), i, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64], i),
        "cublasLtMatrixLayoutDestroy": ([p], i),
        "cublasLtMatmulPreferenceCreate": ([out(p)], i),
        "cublasLtMatmulPreferenceDestroy": ([p], i),
        "cublasLtMatmulPreferenceSetAttribute": ([p, i, p, size], i),
        "cublasLtMatmulAlgoGetHeuristic": ([p, p, p, p, p, p, p, i, result, out(i)], i),
        "cublasLtMatmulAlgoGetIds": ([p, *types, i, out(i), out(i)], i),
        "cublasLtMatmulAlgoInit": ([p, *types, i, algo], i),
        "cublasLtMatmulAlgoCheck": ([p, p, p, p, p, p, algo, result], i),
        "cublasLtMatmulAlgoCapGetAttribute": ([algo, i, p, size, out(size)], i),
        "cublasLtMatmulAlgoConfigSetAttribute": ([algo, i, p, size], i),
        "cublasLtMatmulAlgoConfigGetAttribute": ([algo, i, p, size, out(size)], i),
        "cublasLtMatmul": ([p, p, p, p, p, p, p, p, p, p, p, p, algo, p, size, p], i),
    }


def load_library(load=ctypes.CDLL, platform: str = sys.platform, torch_dir: str = "", cuda_version: str | None = None, mapped: str = ""):
    """The cuBLASLt of this torch with every prototype set. ``load`` stands in for ``ctypes.CDLL`` in tests.

    Raises:
        CublasLtUnavailable: no CUDA build of torch, no library under any known name, or one without a needed function.
    """
    cuda_version = cuda_version or torch.version.cuda
    if not cuda_version:
        raise CublasLtUnavailable("needs a CUDA build of torch (this one has none)")
    tried = []
    for name in candidate_libraries(platform, torch_dir or os.path.dirname(torch.__file__), cuda_version, mapped):
        try:
            library = load(name)
            for function, (arguments, result) in _prototypes().items():
                entry = getattr(library, function)
                entry.argtypes, entry.restype = arguments, result
            return library
        except OSError:
            tried.append(f"{os.path.basename(name)} (not found)")
        except AttributeError as error:
            tried.append(f"{os.path.basename(name)} ({error})")
    raise CublasLtUnavailable("needs the cuBLASLt library that torch ships; tried " + ", ".join(tried))


@functools.cache
def library():
    mapped = ""
    if sys.platform.startswith("linux"):
        torch.cuda.init()  # maps torch's own copy, which must win over any other on the machine
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            mapped = maps.read()
    return load_library(mapped=mapped)


@functools.cache
def unavailable_reason() -> str | None:
    """None when cuBLASLt can be driven on this machine, else why not (answers once per process)."""
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use"
    try:
        library()
    except CublasLtUnavailable as error:
        return str(error)
    return None


def version() -> int:
    return library().cublasLtGetVersion()


def _check(status: int, what: str) -> None:
    if status:
        raise CublasLtError(what, status)


@functools.cache
def _handle(device_index: int):
    """One handle per device; cuBLASLt handles are thread-safe and hold no workspace."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        _check(library().cublasLtCreate(ctypes.byref(handle)), "create handle")
    return handle


class Algorithm:
    """A checked algorithm: its configuration, its opaque struct and the workspace it needs, in bytes."""

    __slots__ = ("config", "struct", "workspace")

    def __init__(self, struct: _Algo, config: Config, workspace: int):
        self.struct, self.config, self.workspace = struct, config, workspace


class Matmul:
    """Descriptors of one :class:`Problem` on one device. Holds no tensor but one zero for nvfp4; threads may share it."""

    def __init__(self, problem: Problem, device: torch.device):
        self.problem = problem
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.lib, self.handle = library(), _handle(self.index)
        operand, output = _OPERAND[problem.kind], _OPERAND[problem.out]
        self._types = (COMPUTE_32F, DataType.R_32F, operand, operand, output, output)
        self._owned: list[tuple[str, ctypes.c_void_p]] = []
        self._scales_and_launch = threading.Lock()  # the scale pointers live in the descriptor: another thread's must not slip in
        self.desc = self._create("MatmulDesc", COMPUTE_32F, DataType.R_32F)
        self._set(DescAttribute.TRANSA, ctypes.c_int32(OP_TRANSPOSE))
        self.a = self._create("MatrixLayout", operand, problem.k, problem.n, problem.k)
        self.b = self._create("MatrixLayout", operand, problem.k, problem.m, problem.k)
        self.d = self._create("MatrixLayout", output, problem.n, problem.m, problem.n)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        if problem.kind == "fp8":
            self._set(DescAttribute.FAST_ACCUM, ctypes.c_int8(0))  # as torch's scaled_mm without use_fast_accum
        if problem.kind == "nvfp4":
            self._set(DescAttribute.A_SCALE_MODE, ctypes.c_int32(SCALE_MODE_VEC16_UE4M3))
            self._set(DescAttribute.B_SCALE_MODE, ctypes.c_int32(SCALE_MODE_VEC16_UE4M3))
            self._set(DescAttribute.POINTER_MODE, ctypes.c_int32(POINTER_MODE_DEVICE))
            self._device_zero = torch.zeros(1, dtype=torch.float32, device=torch.device("cuda", self.index))
        if problem.kind in ("fp8", "nvfp4"):
            # a null scale pointer makes the heuristic answer INVALID_VALUE; any aligned address serves until run() sets the real ones
            self._set_scales(self._device_zero.data_ptr() if problem.kind == "nvfp4" else 256, 256)

    def _create(self, what: str, *arguments):
        handle = ctypes.c_void_p()
        _check(getattr(self.lib, f"cublasLt{what}Create")(ctypes.byref(handle), *arguments), f"{what} for {self.problem}")
        self._owned.append((what, handle))
        return handle

    def __del__(self):
        for what, handle in getattr(self, "_owned", ()):
            getattr(self.lib, f"cublasLt{what}Destroy")(handle)

    def _set(self, attribute: DescAttribute, value) -> None:
        _check(
            self.lib.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), ctypes.sizeof(value)),
            f"descriptor {attribute.name} for {self.problem}")

    def _set_scales(self, weight_scale: int, input_scale: int) -> None:
        self._set(DescAttribute.A_SCALE_POINTER, ctypes.c_void_p(weight_scale))
        self._set(DescAttribute.B_SCALE_POINTER, ctypes.c_void_p(input_scale))

    def heuristics(self, workspace: int, count: int = 32) -> list[Algorithm]:
        """cuBLASLt's own candidates within ``workspace`` bytes, best guess first.

        Raises:
            CublasLtError: the library has no algorithm for this problem on this GPU (NOT_SUPPORTED), or refuses the descriptors.
        """
        preference = ctypes.c_void_p()
        _check(self.lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "preference")
        try:
            limit = ctypes.c_uint64(workspace)
            _check(
                self.lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, PreferenceAttribute.MAX_WORKSPACE_BYTES, ctypes.byref(limit), ctypes.sizeof(limit)),
                "preference MAX_WORKSPACE_BYTES")
            results, found = (_Heuristic * count)(), ctypes.c_int()
            status = self.lib.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.desc, self.a, self.b, self.d, self.d, preference, count, results, ctypes.byref(found))
            _check(status, f"heuristic for {self.problem}")
        finally:
            self.lib.cublasLtMatmulPreferenceDestroy(preference)
        usable = [r for r in results[: found.value] if r.state == 0]
        return [Algorithm(_Algo.from_buffer_copy(r.algo), self.read(r.algo), r.workspace) for r in usable]

    def read(self, algo: _Algo) -> Config:
        """All nine configuration values of an algorithm struct."""
        values = {}
        for name, (attribute, kind) in _CONFIG_TYPES.items():
            value, written = kind(), ctypes.c_size_t()
            status = self.lib.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(algo), attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written))
            _check(status, f"read {name}")
            values[name] = value.value
        return Config(**values)

    def ids(self, count: int = 256) -> list[int]:
        """Every algorithm id the library knows for these types."""
        found, number = (ctypes.c_int * count)(), ctypes.c_int()
        _check(self.lib.cublasLtMatmulAlgoGetIds(self.handle, *self._types, count, found, ctypes.byref(number)), f"ids for {self.problem}")
        return list(found[: number.value])

    def capability(self, algorithm_id: int, what: Capability) -> list[int]:
        """The values an algorithm id accepts for its tile or its stages."""
        algo = self._init(algorithm_id)
        size = ctypes.c_size_t()
        _check(self.lib.cublasLtMatmulAlgoCapGetAttribute(ctypes.byref(algo), what, None, 0, ctypes.byref(size)), what.name)
        values = (ctypes.c_uint32 * (size.value // 4))()
        if size.value:
            _check(
                self.lib.cublasLtMatmulAlgoCapGetAttribute(ctypes.byref(algo), what, values, size.value, ctypes.byref(size)), what.name)
        return list(values)

    def _init(self, algorithm_id: int) -> _Algo:
        algo = _Algo()
        _check(
            self.lib.cublasLtMatmulAlgoInit(self.handle, *self._types, algorithm_id, ctypes.byref(algo)),
            f"algorithm {algorithm_id} for {self.problem}")
        return algo

    def build(self, config: Config) -> Algorithm:
        """The algorithm with exactly this configuration, checked by the library for this problem and this GPU.

        Raises:
            CublasLtError: the id is unknown here, a value is out of its range, or the library refuses the combination.
        """
        algo = self._init(config.id)
        for name, (attribute, kind) in _CONFIG_TYPES.items():
            if name == "id":
                continue
            value = kind(getattr(config, name))
            status = self.lib.cublasLtMatmulAlgoConfigSetAttribute(
                ctypes.byref(algo), attribute, ctypes.byref(value), ctypes.sizeof(value))
            _check(status, f"{name}={value.value} of algorithm {config.id} for {self.problem}")
        result = _Heuristic()
        status = self.lib.cublasLtMatmulAlgoCheck(
            self.handle, self.desc, self.a, self.b, self.d, self.d, ctypes.byref(algo), ctypes.byref(result))
        _check(status, f"check of {config} for {self.problem}")
        return Algorithm(algo, config, result.workspace)

    def run(self, algorithm: Algorithm, x, w, out, workspace=None, x_scale=None, w_scale=None, alpha=None):
        """``out[m, n] = x @ w.T`` with one fixed algorithm, on the device's current stream.

        Args:
            x: ``[m, k]`` row-major operand (for nvfp4 the packed ``[>= m, k/2]`` bytes); ``w``: ``[n, k]`` likewise.
            out: ``[m, n]`` contiguous, owned by the caller.
            workspace: uint8 tensor of at least ``algorithm.workspace`` bytes; None when that is 0.
            x_scale, w_scale: fp8: fp32 scalars on the device; nvfp4: swizzled E4M3 block scales.
            alpha: nvfp4 only: fp32 scalar tensor, product of the two tensor scales.

        Raises:
            CublasLtError: the launch was refused. ValueError: the workspace is too small (cuBLASLt would only notice later).
        """
        have = 0 if workspace is None else workspace.numel()
        if have < algorithm.workspace:
            raise ValueError(f"{self.problem}: this algorithm needs {algorithm.workspace} bytes of workspace, got {have}")
        if alpha is None:
            one, zero = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        else:
            one, zero = alpha.data_ptr(), self._device_zero.data_ptr()
        pointer = out.data_ptr()
        with torch.cuda.device(self.index), self._scales_and_launch:
            if x_scale is not None:
                self._set_scales(w_scale.data_ptr(), x_scale.data_ptr())
            status = self.lib.cublasLtMatmul(
                self.handle, self.desc, one, w.data_ptr(), self.a, x.data_ptr(), self.b, zero, pointer, self.d, pointer, self.d,
                ctypes.byref(algorithm.struct), None if workspace is None else workspace.data_ptr(), have,
                torch._C._cuda_getCurrentRawStream(self.index))
        _check(status, f"matmul {self.problem} with {algorithm.config}")
        return out

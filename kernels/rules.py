"""Constraints that several ops share: what the vector loads of the CUDA sources need, and which torch gives the bytes they reproduce."""

import functools

import torch

from . import nvrtc
from .dispatch import Constraints, Rule

BF16 = frozenset({torch.bfloat16})
TABLE = frozenset({torch.bfloat16, torch.float32})
TRITON_NEEDED = (3, 5)  # the oldest that the kernels were compiled with: torch 2.9's, which TORCH_RMS_NORM needs as well
MAX_NORM_WIDTH = 8192  # a row lives in the registers of two warps


def cuda(dtypes, *rules: Rule) -> Constraints:
    """CUDA C++ through NVRTC on sm_80 and newer (packed bf16 conversion)."""
    return Constraints(frozenset({"cuda"}), dtypes, (8, 0), nvrtc.unavailable_reason, rules)


def triton(dtypes, *rules: Rule) -> Constraints:
    """Triton on NVIDIA or AMD."""
    return Constraints(frozenset({"cuda"}), dtypes, None, triton_unavailable_reason, rules)


@functools.cache
def triton_unavailable_reason() -> str | None:
    """None when Triton kernels can be launched here, else why not (answers once per process)."""
    if not torch.cuda.is_available():
        return "needs a GPU that torch can use"
    try:
        import triton
    # A broken wheel raises what it likes; the reason is kept and shown.
    except Exception as error:
        return f"needs triton, which cannot be imported ({error})"
    version = str(getattr(triton, "__version__", "0"))
    found = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if found < TRITON_NEEDED:
        return f"needs triton {'.'.join(map(str, TRITON_NEEDED))} or newer (found {version})"
    return None


def vector_rows(*names: str) -> Rule:
    """16-byte loads: dense rows that start on 16-byte boundaries."""

    def aligned(tensor: torch.Tensor) -> bool:
        step = 16 // tensor.element_size()
        return tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0 and all(s % step == 0 for s in tensor.stride()[:-1])

    return Rule(f"16-byte aligned rows without gaps in {', '.join(names)}", lambda a: all(aligned(a[name]) for name in names))


def dense(*names: str) -> Rule:
    return Rule(f"unit stride in the last dimension of {', '.join(names)}", lambda a: all(a[name].stride(-1) == 1 for name in names))


def halves(name: str) -> Rule:
    """Both halves of a row in whole 16-byte vectors."""
    return Rule(f"the width of {name} to be a multiple of 16", lambda a: a[name].shape[-1] % 16 == 0 and a[name].shape[-1] > 0)


def width(name: str, most: int | None = None) -> Rule:
    """Whole 16-byte vectors per row."""
    text = f"the width of {name} to be a multiple of 8" + (f" and at most {most}" if most else "")
    return Rule(text, lambda a: a[name].shape[-1] % 8 == 0 and 0 < a[name].shape[-1] <= (most or a[name].shape[-1]))


def one_table_dtype(*names: str) -> Rule:
    return Rule(f"one dtype in {', '.join(names)}", lambda a: len({a[name].dtype for name in names}) == 1)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


TORCH_RMS_NORM = Rule(
    "torch 2.9 or newer: older ones have no fused RMSNorm kernel, so stock gives other bytes there", lambda _: _torch_version() >= (2, 9)
)


def column_threads(vectors: int) -> int:
    """The block size (a multiple of a warp) that covers ``vectors`` columns with the fewest idle threads; the larger one of equals."""
    return min(range(64, 257, 32), key=lambda threads: (-(-vectors // threads) * threads, -threads))

"""One attention call in Python integers: what guards decide on before anything is launched.

Faults of an overflowing kernel are asynchronous or silent, so nothing here reads the device and nothing is tried out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
ALIGNMENT = 16  # bytes: every backend's vector loads


def max_rows(limit: int, row_stride: int) -> int:
    """The most rows whose last row offset ``(rows - 1) * row_stride`` (elements) still fits in ``limit``."""
    return limit // row_stride + 1


@dataclass(frozen=True)
class View:
    """How one of q, k, v lies in memory. ``row_stride`` in elements; ``vector_loads``: last dimension contiguous, rows 16-byte aligned."""

    row_stride: int
    vector_loads: bool


@dataclass(frozen=True)
class Call:
    """Shapes and memory layout of one self-attention call, B = 1.

    Args:
        rows, heads, head_dim: S, H, D.
        views: ``{"q": View, "k": View, "v": View}``.
        gradients: autograd would record this call.
        own_stream: it runs on a stream other than the device's default one. capturing: a CUDA graph records it.
    """

    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    q: View
    k: View
    v: View
    gradients: bool = False
    own_stream: bool = False
    capturing: bool = False

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> "Call":
        """Describe ``q``, ``k``, ``v`` ``[1, S, H, D]``. Raises ValueError when shapes, dtypes or devices differ."""
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4 or tensor.shape[0] != 1:
                raise ValueError(f"attention: {name} must be [1, S, H, D], got {tuple(tensor.shape)}")
            if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
                raise ValueError(
                    f"attention: q, k and v must agree; q is {tuple(q.shape)} {q.dtype} on {q.device}, "
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )
        cuda = q.device.type == "cuda"
        return cls(
            q.shape[1], q.shape[2], q.shape[3], q.dtype, q.device, _view(q), _view(k), _view(v),
            gradients=torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)),
            own_stream=cuda and torch.cuda.current_stream(q.device) != torch.cuda.default_stream(q.device),
            capturing=cuda and torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip

    def last_row(self, name: str) -> int:
        """Element offset of the last row of ``q``, ``k`` or ``v``: the largest product token x row stride."""
        return max(0, self.rows - 1) * getattr(self, name).row_stride

    def dense(self, names: Iterable[str]) -> "Call":
        """The same call with the named tensors copied to contiguous ``[1, S, H, D]``."""
        return replace(self, **{name: View(self.heads * self.head_dim, True) for name in names})

    def with_heads(self, heads: int) -> "Call":
        """The same call on a slice of ``heads`` heads; the tensors stay views of the same buffer."""
        return replace(self, heads=heads)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        return self.rows * self.inner * self.dtype.itemsize


def _view(tensor: torch.Tensor) -> View:
    size = tensor.element_size()
    row, head, last = tensor.stride()[1:]
    # a meta tensor has no address: its layout is judged as if the base were aligned
    base = tensor.data_ptr() % ALIGNMENT if tensor.device.type != "meta" else 0
    return View(row, last == 1 and base == 0 and row * size % ALIGNMENT == 0 and head * size % ALIGNMENT == 0)

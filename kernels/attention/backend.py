"""What a backend is, and the guard that decides before a launch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .call import INT32_MAX, UINT32_MAX, Call, max_rows
from .environment import Environment

EXACTNESS = {
    "E0": "byte-equal to stock",
    "E1": "the same mathematics in 16-bit products and fp32 sums, another order",
    "E2": "other numerics (quantised operands)",
    "E3": "an approximation of attention (sparse)",
}
# Relative L2. A bf16 output alone has 0.2 %; INT8 and FP8 kernels were seen at 0.4-2.4 % on H3's q, k, v; overflow is near 1.
MAX_ERROR = 0.05
FLOATS_16 = (torch.float16, torch.bfloat16)


class AttentionUnavailable(RuntimeError):
    """A requested attention backend cannot run this call; the message names the failing rule and the way out."""


class Backend:
    """One way to compute ``softmax(q k^T / sqrt(D)) v`` on NHD views.

    Class attributes:
        name: registry name, also the node's value. exactness: a key of :data:`EXACTNESS`, against stock with another backend.
        automatic: ``fastest dense`` may choose it. pausable: it may run while an allocation graph is paused.
        max_error: relative L2 error above which its output is not taken for attention when it was asked for by name.
        distributions: packages whose version decides its result and speed.
    """

    name: str
    exactness: str
    automatic = False
    pausable = True
    max_error = MAX_ERROR
    distributions: tuple[str, ...] = ()

    def missing(self, env: Environment) -> str | None:
        """None when this machine can run it at all, else why not."""
        raise NotImplementedError

    def refuses(self, call: Call, env: Environment) -> str | None:
        """None, or the rule this call breaks that no copy of a tensor can mend."""
        raise NotImplementedError

    def limits(self, call: Call, env: Environment) -> Mapping[str, int]:
        """Largest ``(rows - 1) * row_stride`` (elements) that the readers of q, k, v can address; 64-bit ones are left out."""
        return {}

    def scope(self, call: Call) -> Call:
        """The call as one launch of the backend sees it."""
        return call

    def launch(self, q, k, v, copies: tuple[str, ...] = (), prefix_rows: int = 0) -> torch.Tensor:
        """Copy the tensors named in ``copies`` to contiguous ones, then :meth:`run`."""
        # clone, not contiguous(): a contiguous tensor with a misaligned base would come back as it is
        tensors = (t.clone(memory_format=torch.contiguous_format) if n in copies else t for n, t in (("q", q), ("k", k), ("v", v)))
        return self.run(*tensors, prefix_rows)

    def run(self, q, k, v, prefix_rows: int) -> torch.Tensor:
        """``[1, S, H, D]`` views in, token-major ``[S, H*D]`` out, in the input's dtype. Never writes into q, k, v."""
        raise NotImplementedError


def token_major(out: torch.Tensor) -> torch.Tensor:
    """``[1, S, H, D]`` as ``[S, H*D]``: a view where the kernel wrote token-major memory, one copy where it did not."""
    return out.reshape(out.shape[1], out.shape[2] * out.shape[3])


@dataclass(frozen=True)
class Verdict:
    """Whether a backend may run a call. refusal: why not, or None. copies: tensors to copy first. why_copies: the reason, for the user."""

    refusal: str | None
    copies: tuple[str, ...] = ()
    why_copies: str = ""


def guard(backend: Backend, call: Call, env: Environment) -> Verdict:
    """Decide, in integers, whether ``backend`` may run ``call`` and which tensors must be copied to contiguous memory first."""
    call = backend.scope(call)
    refusal = _contract(call) or backend.missing(env) or backend.refuses(call, env)
    if refusal:
        return Verdict(refusal)
    limits = backend.limits(call, env)
    copies, why = [], []
    for name in ("q", "k", "v"):
        view, limit = getattr(call, name), limits.get(name, math.inf)
        if call.last_row(name) > limit:
            copies.append(name)
            most = max_rows(limit, view.row_stride)
            why.append(f"{name}: {call.rows:,} rows x stride {view.row_stride:,} pass {_integer(limit)} offsets ({most:,} rows fit)")
        elif not view.vector_loads:
            copies.append(name)
            why.append(f"{name}: rows are not contiguous and 16-byte aligned")
    dense = call.dense(copies)
    for name in copies:
        if dense.last_row(name) > limits.get(name, math.inf):
            most = max_rows(limits[name], dense.inner)
            return Verdict(f"{call.rows:,} rows: even a contiguous {name} passes {_integer(limits[name])} offsets ({most:,} rows fit)")
    return Verdict(None, tuple(copies), "; ".join(why))


def _integer(limit: int) -> str:
    return {INT32_MAX: "int32", UINT32_MAX: "uint32"}.get(limit, f"{limit:,}-element")


def _contract(call: Call) -> str | None:
    if call.rows == 0 or call.heads == 0:
        return f"needs at least one row and one head, got {call.rows} rows and {call.heads} heads"
    if call.gradients:
        return "does not record gradients"
    return None


def needs_float16(call: Call) -> str | None:
    if call.dtype in FLOATS_16:
        return None
    return f"needs float16 or bfloat16, got {str(call.dtype).removeprefix('torch.')}"

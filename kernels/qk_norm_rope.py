"""Per-head RMSNorm and partial split-half RoPE of q and k, in place on the strided qkv buffer.

Stock calls comfy-kitchen's ``rms_rope_split_half_``, and that call *is* the reference here: whatever kitchen's registry would run for
these tensors (its CUDA kernel on a CUDA 13 torch, its eager one elsewhere). The ``cuda`` backend exists because kitchen's kernel moves 0.74
TB/s on an H200 where 4 TB/s are there; the order that reproduces its bytes is written down in ``csrc/qk_norm_rope.cu``.

Variant ``norm="torch"`` (an op of its own, ``qk_norm_rope_torch``) is what diffusers' attention runs: torch's ``F.rms_norm`` per head,
then the rotation in bf16 operations that each round.
"""

import functools

import torch

from . import nvrtc, rules
from .dispatch import Op, Planned, Rule, Variants


@functools.cache
def _kitchen():
    import comfy_kitchen

    return comfy_kitchen


def reference(
    q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract: comfy-kitchen's in-place op, called as ComfyUI calls it (any dtype and device that kitchen takes)."""
    if q.numel():  # kitchen cannot reshape a tensor without tokens
        _kitchen().rms_rope_split_half_(
            q.unsqueeze(0), k.unsqueeze(0), freqs, q_weight, k_weight, epsilon=eps, rot_dim=freqs.shape[-3] * 2
        )
    return q, k


def reference_torch(
    q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of ``norm="torch"``: ``F.rms_norm``, two rounded products and a rounded sum (any dtype, any device)."""
    half = freqs.shape[3]
    cos, sin = freqs[0, ..., 0, 0], freqs[0, ..., 1, 0]  # [S, 1, rot/2]
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        first, second = normed[..., :half], normed[..., half : 2 * half]
        x[..., :half] = first * cos + -second * sin
        x[..., half : 2 * half] = second * cos + first * sin
        x[..., 2 * half :] = normed[..., 2 * half :]
    return q, k


def check(q, k, freqs, q_weight, k_weight, eps) -> None:
    if q.dim() != 3 or k.shape != q.shape:
        raise ValueError(f"qk_norm_rope: q and k must both be [S, heads, D], got {list(q.shape)} and {list(k.shape)}")
    rows, _, width = q.shape
    if freqs.dim() != 6 or freqs.shape[1] != rows or freqs.shape[-2:] != (2, 2) or 2 * freqs.shape[3] > width:
        raise ValueError(
            f"qk_norm_rope: freqs must be [1, {rows}, 1, rot/2, 2, 2] with rot <= {width}, got {list(freqs.shape)}"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != (width,):
            raise ValueError(f"qk_norm_rope: {name} must have shape [{width}], got {list(weight.shape)}")


OP = Op("qk_norm_rope", reference, ("q", "k", "freqs", "q_weight", "k_weight", "eps"), check)
OPS = Variants("norm", kitchen=OP, torch=Op("qk_norm_rope_torch", reference_torch, OP.signature, check))


HEAD_WIDTH, ROTATED = 128, 96  # what the CUDA source is written for; MiniMax H3's


def _kitchen_runs_cuda(arguments) -> bool:
    kwargs = {
        "q": arguments["q"].unsqueeze(0), "k": arguments["k"].unsqueeze(0), "freqs_cis": arguments["freqs"],
        "q_scale": arguments["q_weight"], "k_scale": arguments["k_weight"], "epsilon": arguments["eps"], "rot_dim": ROTATED,
    }
    try:
        return _kitchen().registry.get_capable_backend("rms_rope_split_half_", kwargs) == "cuda"
    except ImportError:  # then the reference cannot run either, and says so
        return False


def _plan_cuda(q, k, freqs, q_weight, k_weight, eps, torch_norm):
    tokens, heads, _ = q.shape
    if not tokens or not heads:
        return lambda q, k, freqs, q_weight, k_weight, eps: (q, k)
    options = () if torch_norm else ("--ftz=true",)
    kernel = nvrtc.kernel("qk_norm_rope", "PPPPPqqf", q.get_device(), options, HEADS=heads, TORCH_NORM=torch_norm)
    strides = q.stride(0), k.stride(0), eps

    def launch(q, k, freqs, q_weight, k_weight, eps):
        kernel.launch(
            2 * tokens, 32, q.data_ptr(), k.data_ptr(), freqs.data_ptr(), q_weight.data_ptr(), k_weight.data_ptr(), *strides
        )
        return q, k

    return launch


_DTYPES = {name: rules.BF16 for name in ("q", "k", "freqs", "q_weight", "k_weight")}
_LAYOUT = (
    Rule(f"heads of {HEAD_WIDTH} channels of which {ROTATED} rotate",
         lambda a: a["q"].shape[2] == HEAD_WIDTH and a["freqs"].shape[3] * 2 == ROTATED),
    Rule(f"heads packed {HEAD_WIDTH} elements apart", lambda a: all(
        a[name].shape[1] == 1 or a[name].stride(1) == HEAD_WIDTH for name in ("q", "k"))),
    Rule("one contiguous, 16-byte aligned rotation table for one batch item",
         lambda a: a["freqs"].is_contiguous() and a["freqs"].shape[0] == a["freqs"].shape[2] == 1 and a["freqs"].data_ptr() % 16 == 0),
    rules.vector_rows("q", "k", "q_weight", "k_weight"),
)
_KITCHEN = Rule("comfy-kitchen's CUDA kernel to be what stock runs here: its eager one gives other bytes", _kitchen_runs_cuda)
OP.add_backend("cuda", Planned(functools.partial(_plan_cuda, torch_norm=False)), rules.cuda(_DTYPES, *_LAYOUT, _KITCHEN))
OPS["torch"].add_backend(
    "cuda", Planned(functools.partial(_plan_cuda, torch_norm=True)), rules.cuda(_DTYPES, rules.TORCH_RMS_NORM, *_LAYOUT)
)


def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    norm: str = "kitchen",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over each head of q and k, then a rotation of the first ``rot`` channels (pairs ``e, e + rot/2``), in place.

    Args:
        q, k: ``[S, heads, D]``, heads and channels dense, any token stride (views of one qkv buffer); overwritten.
        freqs: ``[1, S, 1, rot/2, 2, 2]`` rotation matrices per token and pair.
        q_weight, k_weight: ``[D]`` RMSNorm weights.
        eps: added to the mean square.
        norm: ``kitchen`` (ComfyUI) or ``torch`` (diffusers): whose reduction order and roundings.

    Returns:
        ``(q, k)``, the same tensors.

    Raises:
        ValueError: shapes do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        _registered(q, k, freqs, q_weight, k_weight, eps, norm)
        return q, k
    return OPS[norm](q, k, freqs, q_weight, k_weight, eps)


@torch.library.custom_op("h3_vortex::qk_norm_rope", mutates_args={"q", "k"})
def _registered(
    q: torch.Tensor, k: torch.Tensor, freqs: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    norm: str = "kitchen",
) -> None:
    OPS[norm](q, k, freqs, q_weight, k_weight, eps)


@_registered.register_fake
def _fake(q, k, freqs, q_weight, k_weight, eps, norm="kitchen"):
    return None

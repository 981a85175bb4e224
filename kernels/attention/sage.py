"""SageAttention 2 (INT8 Q.K, FP8 or FP16 P.V), 3 (FP4, Blackwell) and the old 1.0.6 that the package index still serves.

What is called is ``sageattn(q, k, v, is_causal=False, tensor_layout="NHD", sm_scale=None, smooth_k=False)``: ComfyUI's own keyword
arguments (``attention_sage``, ComfyUI 0.33), so that any build resolves them as it does for stock. Given NHD views, the output is dense
NHD and the head-major copy that stock makes is not needed.

Offsets ``token * row_stride`` overflow silently on a strided projection buffer. Which integer holds them, per GPU and tensor
(SageAttention 2.2.0 ``quant_per_thread.py``, ``quant_per_block.py``, ``csrc/fused/fused.cu``; 1.0.6 ``quant_per_block.py``):

==============================  =======  ==================  =======  =========================
compute capability              q        k                   v        rows at stride 21,504
==============================  =======  ==================  =======  =========================
8.0, 8.9, 9.0 (Triton, FP8 V)   int32    int32 [1]_          uint32   99,865 (q), 199,729 (v)
8.6, 8.7, 7.5 (Triton)          int32    int32 [1]_          int32    99,865
12.0, 12.1, 10.x (CUDA)         uint32   uint32              uint32   199,729
1.0.6, any                      int32    int32               --       99,865
==============================  =======  ==================  =======  =========================

.. [1] 2.2.0 smooths K, and its Triton quantiser then reads the dense difference ``k - mean(k)``; a build whose ``sageattn`` takes
   ``smooth_k`` reads the caller's K.

Contiguous tensors (stride 7,168) reach 299,594 rows in int32 and 599,187 in uint32.
"""

import inspect

import torch

from .backend import AttentionUnavailable, Backend, needs_float16, token_major
from .call import INT32_MAX, UINT32_MAX
from .sage_install import advice

# Largest offsets of the quantisers of q, k, v and of the kernel's own contiguous tensors; ``smoothed``: k - mean(k) is a tensor of its own.
_TRITON_FP8 = {"q": INT32_MAX, "k": INT32_MAX, "v": UINT32_MAX, "own": UINT32_MAX, "smoothed": True}
_TRITON_FP16 = {"q": INT32_MAX, "k": INT32_MAX, "v": INT32_MAX, "own": INT32_MAX, "smoothed": True}
_CUDA = {"q": UINT32_MAX, "k": UINT32_MAX, "v": UINT32_MAX, "own": UINT32_MAX, "smoothed": False}
WIDTHS = {
    (7, 5): _TRITON_FP16,
    (8, 0): _TRITON_FP8,
    (8, 6): _TRITON_FP16,
    (8, 7): _TRITON_FP16,
    (8, 9): _TRITON_FP8,
    (9, 0): {**_TRITON_FP8, "own": INT32_MAX},  # TMA descriptors take int strides
    (10, 0): _CUDA,
    (10, 3): _CUDA,
    (12, 0): _CUDA,
    (12, 1): _CUDA,
}
ARGUMENTS = {"is_causal": False, "tensor_layout": "NHD", "sm_scale": None, "smooth_k": False}
SAGE3_GROUP = 128  # rows per FP4 tile; q, k, v are padded to it


def generation(module) -> int:
    """1 or 2: by symbols, because builds that dispatch differently share a version string."""
    names = ("sageattn_qk_int8_pv_fp16_triton", "sageattn_qk_int8_pv_fp16_cuda", "sageattn_qk_int8_pv_fp8_cuda")
    return 2 if any(hasattr(module, name) for name in names) else 1


def _needs_default_stream(own_stream: bool, capturing: bool) -> str | None:
    if own_stream or capturing:
        return "launches on the default stream only: it cannot run on another stream or be captured in a CUDA graph"
    return None


class Sage2(Backend):
    name = "sage2"
    exactness = "E2"
    automatic = True
    distributions = ("sageattention", "triton", "triton-windows")

    def missing(self, env):
        if not env.nvidia:
            return f"needs an NVIDIA GPU, this is {'ROCm' if env.hip else env.device.type}"
        if env.capability not in WIDTHS:
            return f"has no kernel for compute capability {env.capability[0]}.{env.capability[1]}"
        module, why = env.module("sageattention")
        if module is None:
            return f"{why}. {advice(env)}"
        if generation(module) < 2:
            found = env.version("sageattention") or "without a version"
            return f"found sageattention {found}, needs 2.2 or newer. {advice(env)}"
        return None

    def refuses(self, call, env):
        if call.head_dim not in (64, 128):
            return f"needs a head width of 64 or 128, got {call.head_dim}"
        own = WIDTHS[env.capability]["own"]
        if (call.rows - 1) * call.inner > own:
            return f"{call.rows:,} rows pass the offsets of its own tensors ({own // call.inner + 1:,} rows fit)"
        return needs_float16(call) or _needs_default_stream(call.own_stream, call.capturing)

    def limits(self, call, env):
        widths = WIDTHS[env.capability]
        module, _ = env.module("sageattention")
        dense_k = widths["smoothed"] and "smooth_k" not in inspect.signature(module.sageattn).parameters
        return {name: widths[name] for name in (("q", "v") if dense_k else ("q", "k", "v"))}  # refuses() has checked a dense k

    def run(self, q, k, v, prefix_rows):
        import sageattention

        own = torch.cuda.current_stream(q.device) != torch.cuda.default_stream(q.device)
        reason = _needs_default_stream(own, torch.cuda.is_current_stream_capturing())
        if reason:
            raise AttentionUnavailable(f"H3 attention: {self.name} {reason}")
        return token_major(sageattention.sageattn(q, k, v, **ARGUMENTS))


class Sage1(Backend):
    """PyPI's 1.0.6. Its last key tile is not masked: ``-S mod 64`` phantom keys of score 0 and value 0 dilute every row.

    With ``smooth_k`` it subtracts the mean from the caller's K in place; here it is off, as in ComfyUI's call.
    """

    name = "sage1"
    exactness = "E2"
    distributions = ("sageattention", "triton", "triton-windows")

    def missing(self, env):
        if not env.nvidia:
            return f"needs an NVIDIA GPU, this is {'ROCm' if env.hip else env.device.type}"
        if env.capability >= (12, 0):
            return f"its Triton kernels do not run on compute capability {env.capability[0]}.{env.capability[1]}; sage2 has CUDA ones"
        module, why = env.module("sageattention")
        if module is None:
            return why
        if generation(module) > 1:
            return "the installed sageattention is 2.x: choose sage2"
        return None

    def refuses(self, call, env):
        if call.head_dim not in (64, 96, 128):
            return f"needs a head width of 64, 96 or 128, got {call.head_dim}"
        if (call.rows - 1) * call.inner > INT32_MAX:
            return f"{call.rows:,} rows pass the int32 offsets of its own tensors ({INT32_MAX // call.inner + 1:,} rows fit)"
        return needs_float16(call)

    def limits(self, call, env):
        return {"q": INT32_MAX, "k": INT32_MAX}  # v is converted to a dense fp16 tensor first

    def run(self, q, k, v, prefix_rows):
        import sageattention

        return token_major(sageattention.sageattn(q, k, v, **ARGUMENTS))


class Sage3(Backend):
    """FP4 attention. It subtracts the mean from the K it is given in place, so it is given a copy."""

    name = "sage3"
    exactness = "E2"
    automatic = True
    max_error = 1.0  # FP4 is coarse; by name only noise is refused, and the error is reported. ``fastest dense`` keeps the strict bound
    distributions = ("sageattn3", "triton", "triton-windows")

    def missing(self, env):
        if not env.nvidia or env.capability < (10, 0):
            return "needs an NVIDIA Blackwell GPU (compute capability 10.0 or newer)"
        module, why = env.module("sageattn3")
        if module is None:
            return why
        return None if hasattr(module, "sageattn3_blackwell") else "this sageattn3 has no sageattn3_blackwell"

    def refuses(self, call, env):
        if call.head_dim not in (64, 128):
            return f"needs a head width of 64 or 128, got {call.head_dim}"
        if call.rows <= 1024:  # ComfyUI's attention3_sage leaves such calls to SDPA
            return f"needs more than 1,024 rows, got {call.rows}"
        padded = -(-call.rows // SAGE3_GROUP) * SAGE3_GROUP
        if padded * call.inner > INT32_MAX:
            most = INT32_MAX // call.inner // SAGE3_GROUP * SAGE3_GROUP
            return f"{call.rows:,} rows pass the int32 offsets of its padded tensors ({most:,} rows fit)"
        return needs_float16(call)

    def run(self, q, k, v, prefix_rows):
        import sageattn3

        own_k = k.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        out = sageattn3.sageattn3_blackwell(q.transpose(1, 2), own_k, v.transpose(1, 2), is_causal=False)
        return token_major(out.transpose(1, 2))


BACKENDS = (Sage2(), Sage3(), Sage1())

"""comfy-kitchen's attention: INT8 (dense) and Sol (sparse).

``int8_attention`` takes ``[B, H, S, D]`` views with any strides (64-bit in its quantisers), runs on the current stream and checks its
launches; its attention kernel insists on a contiguous head-major output, so one output copy stays. Its own range check is a Python
error, repeated here so that the choice is made before the launch: strides of the quantised tensors and of the output are int32
(0.2.31; later versions check per head, which allows more, and are held to the same limit).
"""

from .backend import Backend, needs_float16, token_major
from .call import INT32_MAX

CTA_K = 128  # keys per tile of the D = 128 kernel; packed V is padded to it
SOL_BLOCK = 64  # tokens per query and key block
SOL_TAU = 1.3  # routing threshold in sigmas: the default of ComfyUI's Model Sparse Attention node
SOL_EXTRA_TOKENS = 256  # tokens routed one by one beside the blocks: that node's default


class KitchenInt8(Backend):
    name = "kitchen_int8"
    exactness = "E2"
    automatic = True
    distributions = ("comfy-kitchen",)

    def missing(self, env):
        kitchen, why = env.module("comfy_kitchen")
        if kitchen is None:
            return why
        if not hasattr(kitchen, "int8_attention") or not hasattr(kitchen, "int8_attention_is_available"):
            return "this comfy-kitchen has no INT8 attention; 0.2.31 or newer has"
        if env.device.type != "cuda" or not kitchen.int8_attention_is_available(env.device):
            return "needs compute capability 7.5 or RDNA3 and comfy-kitchen's compiled extension"
        return None

    def refuses(self, call, env):
        if call.head_dim > 256:
            return f"needs a head width up to 256, got {call.head_dim}"
        padded = -(-call.rows // CTA_K) * CTA_K
        if padded * call.inner > INT32_MAX:
            most = INT32_MAX // call.inner // CTA_K * CTA_K
            return f"{call.rows:,} rows x {call.heads} heads pass int32 strides of its tensors ({most:,} rows fit; more head_sliced)"
        return needs_float16(call)

    def run(self, q, k, v, prefix_rows):
        import comfy_kitchen

        out = comfy_kitchen.int8_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return token_major(out.transpose(1, 2))


class Sol(Backend):
    """Training-free block-sparse attention (arXiv 2607.24027). Rows ahead of the video stay exact keys for every query."""

    name = "sol"
    exactness = "E3"
    max_error = 1.0  # an approximation by design; beyond this an output of zeros would be nearer
    pausable = False  # it opens an allocation pause of its own, and a pause does not nest
    distributions = ("comfy-kitchen",)

    def missing(self, env):
        kitchen, why = env.module("comfy_kitchen")
        if kitchen is None:
            return why
        if not hasattr(kitchen, "sol_attn") or not hasattr(kitchen, "sol_attn_is_available"):
            return "this comfy-kitchen has no sparse attention; 0.2.36 or newer has"
        if env.device.type != "cuda" or not kitchen.sol_attn_is_available(env.device):
            return "needs compute capability 8.0 and comfy-kitchen's compiled extension"
        return None

    def refuses(self, call, env):
        if call.head_dim != 128:
            return f"needs a head width of 128, got {call.head_dim}"
        return needs_float16(call)

    def limits(self, call, env):
        # The width of its offsets is not documented; a copy past int32 costs little beside the alternative
        return {"q": INT32_MAX, "k": INT32_MAX, "v": INT32_MAX}

    def run(self, q, k, v, prefix_rows):
        import comfy_kitchen

        sink = [0, -(-prefix_rows // SOL_BLOCK)]
        return token_major(comfy_kitchen.sol_attn(q, k, v, tau=SOL_TAU, sink_blocks=sink, token_aug=SOL_EXTRA_TOKENS))


INT8, SOL = KitchenInt8(), Sol()

"""torch's scaled dot product attention with exactly one of its kernels enabled.

ComfyUI's ``attention_pytorch`` calls the same function under a priority list (FlashAttention, cuDNN, memory-efficient, math:
``comfy.ops.SDPA_BACKEND_PRIORITY``, ComfyUI 0.33), so the backend it would take, named alone, gives its bytes. A list with one entry
also steps around a trap of compute capability 9.0: the first call of a process ignores a priority list and takes cuDNN
(``priority_order`` in torch's ``sdp_utils.cpp``).

FlashAttention and the memory-efficient kernel write token-major memory for any input; cuDNN's output follows the layout of q.
FlashAttention and cuDNN address with 64-bit offsets; the memory-efficient kernel does not (illegal memory access at 110,000 rows of
stride 21,504 with torch 2.11 on an H200), so it is given copies of what passes int32.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .backend import Backend, needs_float16, token_major
from .call import INT32_MAX


class _Sdpa(Backend):
    exactness = "E1"
    automatic = True
    kernel: SDPBackend
    minimum = (8, 0)
    max_head_dim = 256
    distributions = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")

    def missing(self, env):
        if env.device.type != "cuda":
            return f"needs a CUDA device, this is {env.device.type}"
        if env.hip is None and env.capability < self.minimum:
            return f"needs compute capability {self.minimum[0]}.{self.minimum[1]}, {env.gpu} has {env.capability[0]}.{env.capability[1]}"
        return None

    def refuses(self, call, env):
        if call.head_dim > self.max_head_dim or call.head_dim % 8:
            return f"needs a head width that is a multiple of 8 up to {self.max_head_dim}, got {call.head_dim}"
        return needs_float16(call)

    def run(self, q, k, v, prefix_rows):
        with sdpa_kernel([self.kernel]):
            out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return token_major(out.transpose(1, 2))


class SdpaFlash(_Sdpa):
    name = "sdpa_flash"
    kernel = SDPBackend.FLASH_ATTENTION

    def missing(self, env):
        if env.device.type == "cpu":  # torch's CPU kernel of the same name
            return None
        if env.device.type == "cuda" and env.hip is None and not torch.backends.cuda.is_flash_attention_available():
            return "this torch build has no FlashAttention"
        return super().missing(env)

    def refuses(self, call, env):
        return None if env.device.type == "cpu" else super().refuses(call, env)


class SdpaCudnn(_Sdpa):
    name = "sdpa_cudnn"
    kernel = SDPBackend.CUDNN_ATTENTION
    max_head_dim = 128

    def missing(self, env):
        if env.hip is not None:
            return "needs an NVIDIA GPU (this torch is built for ROCm)"
        return super().missing(env)


class SdpaEfficient(_Sdpa):
    name = "sdpa_efficient"
    kernel = SDPBackend.EFFICIENT_ATTENTION
    minimum = (5, 0)

    def limits(self, call, env):
        return {"q": INT32_MAX, "k": INT32_MAX, "v": INT32_MAX}

    def refuses(self, call, env):
        return None if call.dtype == torch.float32 and call.head_dim % 8 == 0 else super().refuses(call, env)


BACKENDS = (SdpaFlash(), SdpaCudnn(), SdpaEfficient())

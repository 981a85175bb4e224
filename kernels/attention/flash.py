"""The flash-attn packages: 2 (``flash_attn``), 3 (``flash_attn_interface``, Hopper) and 4 (``flash_attn.cute``).

All take and give dense NHD, run on the current stream and compute in 16-bit products with fp32 sums. 2 and 3 hold strides in int64
(``flash.h``); 4 leaves the width to its DSL, so a tensor past int32 is copied for it.
"""

from .backend import Backend, needs_float16, token_major
from .call import INT32_MAX


class _FlashAttn(Backend):
    exactness = "E1"
    automatic = True
    module: str
    minimum: tuple[int, int]
    below: tuple[int, int] = (99, 0)

    def missing(self, env):
        if not env.nvidia:
            return f"needs an NVIDIA GPU, this is {'ROCm' if env.hip else env.device.type}"
        if not self.minimum <= env.capability < self.below:
            return f"has no kernel for compute capability {env.capability[0]}.{env.capability[1]}"
        module, why = env.module(self.module)
        if module is None:
            return why
        return None if hasattr(module, "flash_attn_func") else f"{self.module} has no flash_attn_func"

    def refuses(self, call, env):
        if call.head_dim > 256 or call.head_dim % 8:
            return f"needs a head width that is a multiple of 8 up to 256, got {call.head_dim}"
        return needs_float16(call)

    def _out(self, result):
        return token_major(result[0] if isinstance(result, tuple) else result)  # 3 and 4 may give the log-sum-exp too


class FlashAttn2(_FlashAttn):
    name = "flash_attn2"
    module = "flash_attn"
    minimum = (8, 0)
    distributions = ("flash-attn",)

    def run(self, q, k, v, prefix_rows):
        from flash_attn import flash_attn_func

        return self._out(flash_attn_func(q, k, v))


class FlashAttn3(_FlashAttn):
    name = "flash_attn3"
    module = "flash_attn_interface"
    minimum, below = (9, 0), (10, 0)
    distributions = ("flash-attn-3", "flash_attn_3")

    def run(self, q, k, v, prefix_rows):
        from flash_attn_interface import flash_attn_func

        return self._out(flash_attn_func(q, k, v))


class FlashAttn4(_FlashAttn):
    name = "flash_attn4"
    module = "flash_attn.cute"
    minimum = (9, 0)
    distributions = ("flash-attn-4",)

    def limits(self, call, env):
        return {"q": INT32_MAX, "k": INT32_MAX, "v": INT32_MAX}

    def run(self, q, k, v, prefix_rows):
        from flash_attn.cute import flash_attn_func

        return self._out(flash_attn_func(q, k, v))


BACKENDS = (FlashAttn2(), FlashAttn3(), FlashAttn4())

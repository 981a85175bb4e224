"""The nodes of the pack. Each file is one stage; the tensors' work is done in ``h3``, ``kernels`` and ComfyUI's own nodes."""

import logging

from comfy_api.latest import ComfyExtension

from . import host

log = logging.getLogger("h3_vortex")


class H3VortexExtension(ComfyExtension):
    async def get_node_list(self):
        problem = host.missing()
        if problem:
            log.error(problem)
            return []
        from . import status
        from .accelerate import H3VortexAccelerate
        from .conditioning import H3VortexConditioning
        from .decode import H3VortexDecode
        from .denoise import H3VortexDenoise
        from .load import H3VortexLoad
        from .sampler import H3VortexSampler
        from .turbo import H3VortexTurboLora
        from .warmup import H3VortexWarmup

        status.register()
        return [
            H3VortexLoad, H3VortexTurboLora, H3VortexAccelerate, H3VortexWarmup, H3VortexConditioning, H3VortexSampler, H3VortexDenoise,
            H3VortexDecode,
        ]  # fmt: skip

"""ComfyUI-H3-Vortex: MiniMax H3 in ComfyUI, the same bytes in less time.

Importable without ComfyUI and without an accelerator: the nodes are imported only when ComfyUI asks for them.
"""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import H3VortexExtension

    return H3VortexExtension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

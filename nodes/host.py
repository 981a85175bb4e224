"""Which ComfyUI this is, and whether it has what the nodes stand on."""

import importlib.util

NEEDED = "0.33.0"
MODULES = ("comfy_extras.nodes_minimax_h3", "comfy.ldm.minimax", "comfy.nested_tensor", "comfy.text_encoders.minimax")
SCHEMA = ("Autogrow", "Guider", "Noise", "Sigmas", "Video")


def version():
    """ComfyUI's version as it states it, or "unknown"."""
    if importlib.util.find_spec("comfyui_version") is None:
        return "unknown"
    import comfyui_version

    return getattr(comfyui_version, "__version__", "unknown")


def missing():
    """One line that says what this ComfyUI lacks, or None when it has all of it. Looks at features, not at the version."""
    from comfy_api.latest import io

    lacks = [name for name in MODULES if _absent(name)]
    lacks += [f"comfy_api.latest.io.{name}" for name in SCHEMA if not hasattr(io, name)]
    if not lacks:
        return None
    return f"H3 Vortex needs ComfyUI >= {NEEDED} (found {version()}, without {lacks[0]}): update ComfyUI"


def _absent(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # the parent package is absent too
        return True

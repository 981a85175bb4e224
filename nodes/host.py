"""Which ComfyUI this is, whether it has what the nodes stand on, and its server."""

import importlib.util
import sys

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


def server():
    """The running server, or None: ComfyUI imported as a library has none."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def show(node, text):
    """Show ``text`` on a node of the canvas that queued the running job, as core's GetImageSize does, until the next text.

    node: its unique id; nothing is shown without one, without a server, or for a job that no page waits for.
    """
    instance = server()
    if instance is not None and instance.client_id is not None and node is not None:
        instance.send_progress_text(text, node, instance.client_id)


def node_id(cls):
    """The unique id of the running node; None when its ``execute`` was called by hand."""
    return getattr(cls.hidden, "unique_id", None)


def shown(cls, text):
    """``ui`` of a node that reports ``text``: kept in the history, and shown on the node (``Hidden.unique_id`` in its schema)."""
    from comfy_api.latest import ui

    show(node_id(cls), text)
    return ui.PreviewText(text)

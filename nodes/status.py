"""``GET /h3_vortex/status`` on ComfyUI's own server, behind its own origin check: what the kernels did in this process."""

import sys

from aiohttp import web

from ..kernels.patch import report

PATH = "/h3_vortex/status"


async def answer(request):
    return web.json_response(report.status())


def register():
    """Add the route to the running server. ComfyUI imported as a library has no server and gets none."""
    instance = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if instance is not None:
        instance.routes.get(PATH)(answer)

"""``GET /h3_vortex/status`` on ComfyUI's own server, behind its own origin check: what the kernels did in this process."""

from aiohttp import web

from ..kernels.patch import report
from . import host

PATH = "/h3_vortex/status"


async def answer(request):
    return web.json_response(report.status())


def register():
    """Add the route to the running server. ComfyUI imported as a library has no server and gets none."""
    instance = host.server()
    if instance is not None:
        instance.routes.get(PATH)(answer)

"""A running ComfyUI for tests: :class:`frontdoor.server.Server` with a blocking client."""

import asyncio

from h3_vortex.frontdoor.client import Client
from h3_vortex.frontdoor.server import Server


class HostServer(Server):
    """Adds to ``Server`` (``url``, ``log``, ``start``, ``stop``): ``queue``, ``get``, ``post``, ``interrupt``, ``upload``."""

    def _call(self, method, *args, **kwargs):
        async def call():
            async with Client(self.url) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(call())

    def queue(self, graph, timeout=300, on_event=None):
        """Run an API-format graph (dict) to its end; see ``client.Result``. A failed graph is a result, not an exception."""
        return self._call("queue", graph, timeout=timeout, on_event=on_event)

    def get(self, path, **params):
        """(status, JSON or text)."""
        return self._call("get", path, **params)

    def post(self, path, body=None):
        """(status, JSON or text)."""
        return self._call("post", path, body)

    def interrupt(self):
        return self._call("interrupt")

    def upload(self, path):
        """Copy a local file into the server's input folder; returns the name for a Load node."""
        return self._call("upload", path)

    def download(self, entry, folder):
        return self._call("download", entry, folder)

    def object_info(self):
        status, info = self.get("/object_info")
        assert status == 200, info
        return info

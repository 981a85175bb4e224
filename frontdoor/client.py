"""A ComfyUI server through its HTTP and websocket API: queue a graph, watch it, fetch what it made.

The only module of the front door that needs a package, aiohttp, which every Python that runs ComfyUI has.
"""

import asyncio
import json
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10))}


@dataclass
class Result:
    """What became of one queued graph.

    outputs: node id -> its UI output (``{"images": [{"filename", "subfolder", "type"}], "text": [...]}``).
    error: None, or the server's description: ``{"type", "message", ...}`` when the graph was refused,
    ``{"node_id", "node_type", "exception_type", "exception_message", "traceback", ...}`` when a node raised,
    with ``"type": "execution_interrupted"`` when it was interrupted.
    node_errors: node id -> validation errors of a refused graph. events: websocket messages in order.
    """

    prompt_id: str | None = None
    outputs: dict = field(default_factory=dict)
    error: dict | None = None
    node_errors: dict = field(default_factory=dict)
    events: list = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self):
        return self.error is None

    @property
    def interrupted(self):
        return self.error is not None and self.error.get("type") == "execution_interrupted"

    def message(self):
        """The error in one text, or an empty string."""
        if self.error is None:
            return ""
        if self.interrupted:
            return f"interrupted in {self.error.get('node_type')} (node {self.error.get('node_id')})"
        if "exception_message" in self.error:
            where = f"{self.error.get('node_type')} (node {self.error.get('node_id')})"
            return f"{where}: {self.error.get('exception_type')}: {self.error['exception_message'].strip()}"
        lines = [f"{self.error.get('message')} {self.error.get('details') or ''}".strip()]
        for node, found in self.node_errors.items():
            said = set()
            for error in found["errors"]:
                # A node that refuses its inputs together is reported once for each of them: "width - REASON", "height - REASON".
                of_all = error.get("type") == "custom_validation_failed"
                reason = error["details"].partition(" - ")[2] if of_all else ""
                if not reason or reason not in said:
                    lines.append(f"{found.get('class_type')} (node {node}): {error['message']}: {reason or error['details']}")
                said.add(reason)
        return "\n".join(lines)

    def texts(self):
        """Every text that a node showed, in node order."""
        lists = [ui["text"] for ui in self._shown().values() if isinstance(ui.get("text"), list)]
        return [text for texts in lists for text in texts if isinstance(text, str)]

    def _shown(self):
        return {node: ui for node, ui in self.outputs.items() if isinstance(ui, dict)}

    def files(self):
        """(node id, file entry) for every file the graph left on the server, saved outputs before previews."""
        found = []
        for node, ui in self._shown().items():
            for entries in ui.values():
                if isinstance(entries, list):
                    found += [(node, entry) for entry in entries if isinstance(entry, dict) and entry.get("filename")]
        return sorted(found, key=lambda item: item[1].get("type") != "output")


class Client:
    """``async with Client(url) as client: result = await client.queue(graph)``."""

    def __init__(self, url):
        self.url = url.rstrip("/")
        self._session = None

    async def __aenter__(self):
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=10, sock_read=120))
        return self

    async def __aexit__(self, *exc):
        await self._session.close()

    async def get(self, path, **params):
        """GET; returns (status, JSON or text)."""
        async with self._session.get(self.url + path, params=params) as reply:
            return reply.status, await _body(reply)

    async def post(self, path, body=None):
        """POST a JSON body; returns (status, JSON or text)."""
        async with self._session.post(self.url + path, json=body if body is not None else {}) as reply:
            return reply.status, await _body(reply)

    async def interrupt(self):
        return await self.post("/interrupt")

    async def queue(self, graph, timeout=600, on_event=None, prompt_id=None):
        """Queue an API-format graph and wait for its end. Returns a :class:`Result`; a failed graph does not raise.

        on_event: called with (message type, data) for each websocket message of this graph.
        prompt_id: a UUID to queue it under, so that :meth:`finished` and :meth:`cancel` can be asked about it; else the server makes one.
        Raises TimeoutError after ``timeout`` seconds (the graph is interrupted) and ConnectionError when the server goes.
        """
        result, began, client_id = Result(), time.monotonic(), uuid.uuid4().hex
        socket = await self._session.ws_connect(f"{self.url}/ws?clientId={client_id}", max_msg_size=0, heartbeat=None)
        async with socket:
            name = {"prompt_id": prompt_id} if prompt_id else {}
            status, body = await self.post("/prompt", {"prompt": graph, "client_id": client_id, **name})
            if status != 200 or not isinstance(body, dict):
                refused = body.get("error") if isinstance(body, dict) else None
                if not isinstance(refused, dict):
                    refused = {"type": "refused", "message": f"HTTP {status}: {refused or body}"}
                result.error, result.node_errors = refused, body.get("node_errors") or {} if isinstance(body, dict) else {}
                return result
            # A graph with one bad branch is still accepted for the others; the bad branch is reported here.
            result.prompt_id, result.node_errors = body["prompt_id"], body.get("node_errors") or {}
            try:
                await asyncio.wait_for(self._follow(socket, result, on_event), timeout)
            except asyncio.TimeoutError:
                await self.interrupt()
                last = result.events[-1] if result.events else "no event"
                raise TimeoutError(f"graph not finished after {timeout} s; last event: {str(last)[:300]}") from None
        _, history = await self.get(f"/history/{result.prompt_id}")
        result.outputs = history.get(result.prompt_id, {}).get("outputs", {})
        result.seconds = time.monotonic() - began
        return result

    async def cancel(self, prompt_id):
        """Take a graph out of the queue, or interrupt it when it runs; no other graph is touched."""
        return await self.post(f"/api/jobs/{prompt_id}/cancel")

    async def finished(self, prompt_id):
        """The :class:`Result` of a graph that the server has finished without an error, or None."""
        _, history = await self.get(f"/history/{prompt_id}")
        entry = history.get(prompt_id) if isinstance(history, dict) else None
        if entry is None or (entry.get("status") or {}).get("status_str") != "success":
            return None
        return Result(prompt_id=prompt_id, outputs=entry.get("outputs", {}))

    async def _follow(self, socket, result, on_event):
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:  # a preview picture
                continue
            if message.type != aiohttp.WSMsgType.TEXT:
                break
            event = json.loads(message.data)
            kind, data = event["type"], event.get("data") or {}
            if data.get("prompt_id") != result.prompt_id:
                continue
            result.events.append(event)
            if on_event is not None:
                on_event(kind, data)
            if kind in ("execution_error", "execution_interrupted"):
                result.error = {"type": kind, **data}
            # Sent after the history entry exists, unlike execution_success.
            if kind == "executing" and data.get("node") is None:
                return
        raise ConnectionError(f"{self.url} closed the connection before the graph was finished")

    async def upload(self, path, kind="image"):
        """Put a local file into the server's input folder; returns the name that a Load node takes."""
        form = aiohttp.FormData()
        form.add_field("image", Path(path).read_bytes(), filename=Path(path).name)
        form.add_field("overwrite", "true")
        async with self._session.post(f"{self.url}/upload/{kind}", data=form) as reply:
            body = await _body(reply)
            if reply.status != 200:
                raise ConnectionError(f"upload of {path} refused: HTTP {reply.status}: {body}")
            return "/".join(part for part in (body.get("subfolder"), body["name"]) if part)

    async def download(self, entry, folder):
        """Fetch one file entry of :meth:`Result.files` into ``folder``; returns the path. Never overwrites."""
        keys = ("filename", "subfolder", "type")
        query = {key: str(entry[key]) for key in keys if entry.get(key)}
        async with self._session.get(f"{self.url}/view", params=query) as reply:
            if reply.status != 200:
                raise ConnectionError(f"{self.url}/view has no {query}: HTTP {reply.status}")
            path = output_path(folder, entry["filename"])
            with open(path, "xb") as file:
                try:
                    async for chunk in reply.content.iter_chunked(1 << 20):
                        file.write(chunk)
                except BaseException:
                    file.close()
                    path.unlink()
                    raise
        return path


async def _body(reply):
    text = await reply.text()
    return json.loads(text) if "json" in reply.headers.get("Content-Type", "") else text


def safe_name(name):
    """A plain file name from one that a server gave: no folder, drive, stream, control character or device name."""
    name = re.split(r"[/\\:]", str(name))[-1]
    name = re.sub(r'[\x00-\x1f\x7f<>"|?*]', "_", name).strip(". ")
    if name.split(".")[0].rstrip(" ").lower() in WINDOWS_DEVICES:
        name = "_" + name
    return name or "output"


def output_path(folder, name):
    """A path directly inside ``folder`` (made if absent) that does not exist yet, for the server-given ``name``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plain = Path(safe_name(name))
    path, count = folder / plain, 1
    while path.exists() or path.is_symlink():
        count += 1
        path = folder / f"{plain.stem}-{count}{plain.suffix}"
    return path

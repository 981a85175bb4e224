"""Progress of a queued graph: a bar on a terminal, one line per node elsewhere."""

import asyncio
import sys
import time


class Progress:
    """Give ``Progress(graph)`` as ``on_event`` to ``Client.queue``; ``close()`` at the end (or use ``with``)."""

    def __init__(self, graph, stream=None):
        self.graph, self.stream = graph, stream or sys.stderr
        self.done, self.node, self.since, self.bar = set(), None, time.monotonic(), None
        if self.stream.isatty():
            from tqdm import tqdm

            layout = "{desc:<30.30} {bar} {n_fmt}/{total_fmt} nodes {elapsed} {postfix}"
            self.bar = tqdm(total=len(graph), file=self.stream, bar_format=layout)

    def __call__(self, kind, data):
        if kind == "execution_cached":
            for node in data.get("nodes") or ():
                self._finish(node)
        elif kind == "executing":
            if self.node is not None:
                self._finish(self.node, time.monotonic() - self.since)
            self.node, self.since = data.get("node"), time.monotonic()
            if self.bar is not None and self.node is not None:
                self.bar.set_description_str(self.title(self.node))
                self.bar.set_postfix_str("")
        elif kind == "progress" and self.bar is not None:
            self.bar.set_postfix_str(f"step {data.get('value')}/{data.get('max')}")

    async def keep_time(self):
        """Redraw every second: a node may take a minute without an event."""
        while True:
            await asyncio.sleep(1)
            if self.bar is not None:
                self.bar.refresh()

    def title(self, node):
        """What the user calls the node: its title in the graph, else its class."""
        entry = self.graph.get(node) or {}
        return (entry.get("_meta") or {}).get("title") or entry.get("class_type") or str(node)

    def _finish(self, node, seconds=None):
        if node in self.done:
            return
        self.done.add(node)
        if self.bar is not None:
            self.bar.update()
        elif seconds is not None:
            print(f"  {seconds:7.2f} s  {self.title(node)}", file=self.stream, flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

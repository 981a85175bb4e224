"""Progress of a queued graph: a bar on a terminal, one line per node and per ten seconds of steps elsewhere."""

import asyncio
import sys
import time


class Progress:
    """Give ``Progress(graph)`` as ``on_event`` to ``Client.queue``; ``close()`` at the end (or use ``with``)."""

    def __init__(self, graph, stream=None):
        self.graph, self.stream = graph, stream or sys.stderr
        self.done, self.node, self.since, self.bar = set(), None, time.monotonic(), None
        self.first, self.told = None, self.since  # (step, time) of the node's first event; when a line was last written
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
            self.node, self.since, self.first = data.get("node"), time.monotonic(), None
            self.told = self.since
            if self.bar is not None and self.node is not None:
                self.bar.set_description_str(self.title(self.node))
                self.bar.set_postfix_str("")
        elif kind == "progress":
            now = time.monotonic()
            if self.first is None or data.get("node") != self.node:
                self.first = (data.get("value"), now)
            text = pace(data.get("value"), data.get("max"), *self.first, now)
            if self.bar is not None:
                self.bar.set_postfix_str(text)
            elif now - self.told >= 10:
                self.told = now
                print(f"             {self.title(data.get('node'))}: {text}", file=self.stream, flush=True)

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


def pace(step, steps, first_step, first_time, now):
    """"step 7/20, 3.1 s a step, 40 s left", from the first step that was seen; without a pace until there are two."""
    text = f"step {step}/{steps}"
    if step is None or steps is None or step <= first_step:
        return text
    each = (now - first_time) / (step - first_step)
    return f"{text}, {each:.2g} s a step, {each * (steps - step):.0f} s left"

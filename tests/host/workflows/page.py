"""ComfyUI's real page in a headless Chromium: open workflows, read what is on the canvas, take pictures.

Needs the package comfyui-frontend-package (the page), playwright (the driver) and a Chromium of the system.
"""

import importlib.util
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Failures of these are the closed network's or a missing file of the user's, not the workflow's.
OPTIONAL = ("/api/userdata", "/api/experiment", "api.comfy.org", "/user.css", "/releases", "/view?")

SETTINGS = {
    "Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.49.6", "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
}  # fmt: skip


def missing():
    """What the tier lacks, in one line, or None."""
    lacks = [name for name in ("comfyui_frontend_package", "playwright") if importlib.util.find_spec(name) is None]
    lacks += [] if browser() else ["a Chromium"]
    if not lacks:
        return None
    return (
        f"frontend tests: no {', '.join(lacks)}: pip install comfyui-frontend-package==1.49.6 playwright, and a Chromium of the "
        "system (Debian: apt install chromium)"
    )


def browser():
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def root():
    """The folder for ComfyUI's --front-end-root."""
    return Path(importlib.util.find_spec("comfyui_frontend_package").origin).parent / "static"


class Page:
    """One open tab. ``errors``: console errors and exceptions since it was opened, or since ``clear``."""

    def __init__(self, tab, url):
        self.tab, self.url, self.errors = tab, url, []
        tab.on("console", lambda message: self._note(message.text, message.location.get("url", "")) if message.type == "error" else None)
        tab.on("pageerror", lambda error: self._note(f"exception: {error}", ""))

    def _note(self, text, source):
        if not any(part in text or part in source for part in OPTIONAL):
            self.errors.append(f"{text} ({source})" if source else text)

    def open(self):
        # as for a user who has been here before: no tour, no template browser at start
        for name, value in SETTINGS.items():
            self.tab.request.post(f"{self.url}/api/settings/{name}", data=json.dumps(value), headers={"Content-Type": "application/json"})
        self.tab.goto(self.url, wait_until="domcontentloaded")
        self.tab.wait_for_function("() => window.app?.graph && window.app?.extensionManager && window.LiteGraph", timeout=120_000)
        self.tab.wait_for_function("() => document.querySelector('canvas') !== null")
        self.tab.wait_for_timeout(1500)
        return self

    def evaluate(self, script, argument=None):
        return self.tab.evaluate(script, argument)

    def load(self, workflow, name):
        """Open a canvas-format workflow as the page opens a file."""
        self.evaluate("([w, n]) => window.app.loadGraphData(w, true, true, n)", [workflow, name])
        self.tab.wait_for_timeout(600)

    def saved(self):
        return self.evaluate("() => window.app.graph.serialize()")

    def exported(self):
        """The API format, as Workflow > Export (API) gives it."""
        return self.evaluate("async () => (await window.app.graphToPrompt()).output")

    def fit(self, margin=60):
        """Scale and move the canvas so that everything is seen."""
        self.evaluate(
            """margin => {
              const canvas = window.app.canvas, graph = window.app.graph
              const boxes = [...graph._nodes.map(n => [n.pos[0], n.pos[1] - 34, n.pos[0] + n.size[0], n.pos[1] + n.size[1]]),
                             ...graph._groups.map(g => [g.pos[0], g.pos[1], g.pos[0] + g.size[0], g.pos[1] + g.size[1]])]
              const [left, top] = [0, 1].map(i => Math.min(...boxes.map(b => b[i])) - margin)
              const [right, bottom] = [2, 3].map(i => Math.max(...boxes.map(b => b[i])) + margin)
              const area = canvas.canvas.getBoundingClientRect()
              const scale = Math.min(area.width / (right - left), area.height / (bottom - top))
              canvas.ds.scale = scale
              canvas.ds.offset = [-left + (area.width / scale - (right - left)) / 2, -top + (area.height / scale - (bottom - top)) / 2]
              canvas.setDirty(true, true)
            }""",
            margin,
        )
        self.tab.wait_for_timeout(800)

    def picture(self, path, **kwargs):
        self.tab.screenshot(path=str(path), **kwargs)


@contextmanager
def pages(url, profile, size=(1600, 900)):
    """``with pages(server.url, tmp_path) as new: page = new()``: a browser with an empty profile; its tabs share it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(profile), executable_path=browser(), headless=True, args=list(FLAGS), viewport={"width": size[0], "height": size[1]},
        )  # fmt: skip
        try:
            yield lambda: Page(context.new_page(), url)
        finally:
            context.close()

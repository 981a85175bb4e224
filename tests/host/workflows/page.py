"""ComfyUI's real page in a headless Chromium: open workflows, read what is on the canvas, take pictures.

Needs the package comfyui-frontend-package (the page), playwright (the driver) and a Chromium of the system.
"""

import importlib.util
import io
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageChops

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# The page's own: what it tries at start without a network, a user's files that are not there, and a line it always logs.
OPTIONAL = (
    "/api/userdata", "/api/experiment", "api.comfy.org", "/user.css", "/releases", "/templates/index", "core workflow templates",
    "graph accessed before initialization",
)  # fmt: skip

SETTINGS = {
    "Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.49.6", "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
}  # fmt: skip

# Nothing but the canvas and what nodes show on it (texts, pictures, films).
BARE = "body * { visibility: hidden !important } canvas, .dom-widget, .dom-widget * { visibility: visible !important }"


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
        self.tab.wait_for_function("() => window.app?.canvas?.graph && window.LiteGraph", timeout=120_000)
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
        """The API format, as Workflow > Export (API) gives it, without the film that the page shows in Load Video."""
        graph = self.evaluate("async () => (await window.app.graphToPrompt()).output")
        for node in graph.values():
            node["inputs"].pop("video-preview", None)
        return graph

    def fit(self, margin=30):
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

    def picture_of_graph(self, path, width=960):
        """A small JPEG of the whole graph, without the bars and menus around it."""
        self.fit()
        style = self.tab.add_style_tag(content=BARE)
        shot = Image.open(io.BytesIO(self.tab.screenshot())).convert("RGB")
        style.evaluate("element => element.remove()")
        box = ImageChops.difference(shot, Image.new("RGB", shot.size, shot.getpixel((0, 0)))).point(lambda v: 255 * (v > 40)).getbbox()
        shot = shot.crop(box)
        shot.resize((width, round(shot.height * width / shot.width)), Image.Resampling.LANCZOS).save(path, quality=80, optimize=True)

    def show(self, node, scale=1.0):
        """Bring one node to the middle and click its title."""
        x, y = self.evaluate(
            """([id, scale]) => {
              const canvas = window.app.canvas, node = window.app.graph.getNodeById(id)
              canvas.ds.scale = scale
              canvas.centerOnNode(node)
              canvas.setDirty(true, true)
              const area = canvas.canvas.getBoundingClientRect()
              const [x, y] = canvas.ds.convertOffsetToCanvas([node.pos[0] + 100, node.pos[1] - 15])
              return [area.left + x, area.top + y]
            }""",
            [node, scale],
        )
        self.tab.wait_for_timeout(300)
        self.tab.mouse.click(x, y)
        self.tab.wait_for_timeout(500)

    def open_help(self, node):
        """Click the info button of a node; returns the text of the page that opens."""
        self.show(node)
        self.tab.locator('[data-testid="info-button"]').click()
        help_page = self.tab.locator(".node-help-content").first
        help_page.wait_for(timeout=20_000)
        self.tab.wait_for_timeout(700)
        return help_page.inner_text()

    def set_widgets(self, values, numbers):
        """Replace widget values by ``values`` (old text -> new) and by ``numbers`` (widget name -> new)."""
        self.evaluate(
            """([values, numbers]) => {
              for (const node of window.app.graph._nodes) for (const widget of node.widgets ?? []) {
                if (values[widget.value] !== undefined) widget.value = values[widget.value]
                const presets = widget.name === 'steps' && widget.value === 0
                if (numbers[widget.name] !== undefined && !presets) widget.value = numbers[widget.name]
              }
            }""",
            [values, numbers],
        )

    def texts(self):
        """{title of a node: the text shown on it after a run}."""
        return self.evaluate(
            """() => Object.fromEntries(window.app.graph._nodes.flatMap(node => (node.widgets ?? [])
              .filter(widget => widget.name === '$$node-text-preview').map(widget => [node.title, String(widget.value)])))"""
        )

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

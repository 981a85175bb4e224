"""Run every test tier that this machine can, and say in one line per missing tier what would enable it.

  unit       any machine
  host       a ComfyUI 0.33 or newer (COMFYUI_DIR, the tree this pack is in, or the cache)
  gpu        an NVIDIA GPU and a CUDA build of torch
  blackwell  an NVIDIA GPU of compute capability 10.0 or higher

The tests run under the Python that runs the found ComfyUI when there is one (the test tools then go into
.test-packages here, not into that Python), else under the pack's own .venv, made when absent.
H3_REQUIRE=host,gpu makes a missing tier a failure. Arguments after -- go to pytest.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import environment, interpreter, locate

HELP = "run every test tier that this machine can"
ROOT = Path(__file__).resolve().parent.parent
TIERS = ("unit", "host", "gpu", "blackwell")
FOLDERS = {"unit": ("tests/unit", "tests/reports")}  # of a tier that has more than its own
# Whole videos through servers of their own: with the unit tier as long as the rest of the host tier.
VIDEOS = ("tests/host/workflows", "tests/host/test_nodes_workflows.py")
TOOLS = ("pytest", "hypothesis", "jsonschema")
# Not `python -m pytest`: that puts the working directory, and so the pack's nodes/, on sys.path.
PYTEST = """
import sys
root, extra = sys.argv[1:3]
del sys.argv[1:3]
sys.path[:] = [folder for folder in sys.path if folder not in ("", root)] + ([extra] if extra else [])
import pytest
sys.exit(pytest.main())
"""
PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
if found["cuda"]:
    found |= {"name": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
print(json.dumps(found))
"""


def add_arguments(parser):
    interpreter.add_arguments(parser)
    parser.add_argument("--tier", action="append", choices=TIERS, help="only this tier; repeatable")
    parser.add_argument("pytest", nargs="*", metavar="-- ARG", help="arguments for pytest, after --")


def run(args):
    required = set(filter(None, os.environ.get("H3_REQUIRE", "").split(",")))
    if required - set(TIERS):
        raise environment.SetupError(f"H3_REQUIRE={','.join(sorted(required))}: the tiers are {', '.join(TIERS)}")
    if not (ROOT / "tests").is_dir():
        raise environment.SetupError(f"{ROOT} has no tests/: the registry's archive leaves them out; clone the repository.")
    tree = locate.find_comfyui(args.comfyui)
    python, extra = test_python(tree, args.python)
    device = json.loads(environment.output(python, PROBE))
    environ = dict(os.environ)
    if tree is not None:
        environ["COMFYUI_DIR"] = str(tree.path)
        print(tree.describe())
    print(f"{python}: torch {device['torch']}, {device.get('name', 'no CUDA device')}")
    tiers = args.tier or TIERS
    missing = {tier: why_missing(tier, tree, device) for tier in tiers}
    command = [str(python), "-c", PYTEST, str(ROOT), str(extra or ""), "--import-mode=importlib", "-rs"]

    def pytest(tier, *paths, output=None):
        """(pytest's exit status, seconds) of ``paths``, or of a whole tier."""
        began = time.monotonic()
        paths = paths or FOLDERS.get(tier, (f"tests/{tier}",))
        done = subprocess.run([*command, *paths, *args.pytest], cwd=ROOT, env=environ, stdout=output, stderr=output)
        return done.returncode, time.monotonic() - began

    results = {}
    # The host tier waits for servers and keeps one core busy, so the unit tier and then its own longest tests may have the other. Each
    # takes its share of the cores: tiny models gain nothing from a second thread, and threads without a core wait for each other.
    cores = os.cpu_count() or 1
    together = {"unit", "host"} <= {tier for tier in tiers if not missing[tier]} and cores > 1
    if together:
        environ.setdefault("OMP_NUM_THREADS", str(cores // 2))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output, ThreadPoolExecutor(1) as beside:
        if together:
            unit = beside.submit(pytest, "unit", output=output)
            videos = beside.submit(pytest, "host", *VIDEOS, output=output)
        for tier in tiers:
            if missing[tier] or (tier == "unit" and together):
                continue
            if tier == "host" and together:
                print("\n== tests/host (beside it tests/unit, then the tests that make whole videos; their output follows)", flush=True)
                rest = pytest("host", "tests/host", *(f"--ignore={path}" for path in VIDEOS))
                results["unit"], results["host"] = unit.result(), both(rest, videos.result())
                output.seek(0)
                print(f"\n== tests/unit, then tests/host that make whole videos\n{output.read()}", flush=True)
                continue
            print(f"\n== tests/{tier}", flush=True)
            results[tier] = pytest(tier)
    lines = []
    for tier in tiers:
        if missing[tier]:
            verdict = "MISSING, and H3_REQUIRE asks for it" if tier in required else "not run"
            lines.append(f"{tier:<10} {verdict}: {missing[tier]}")
        else:
            code, seconds = results[tier]
            lines.append(f"{tier:<10} {verdict_of(code)} in {seconds:.0f} s")
    print("\nTiers\n  " + "\n  ".join(lines), flush=True)
    return 1 if any(code for code, _ in results.values()) or any(missing[tier] for tier in required & set(tiers)) else 0


def both(one, other):
    """The (exit status, seconds) of a tier that ran in two parts: a part in which no test was chosen is no failure by itself."""
    codes = {one[0], other[0]}
    return max(codes - {5} or codes), one[1] + other[1]


def verdict_of(code):
    """pytest's exit status in words."""
    return {0: "passed", 1: "FAILED", 2: "INTERRUPTED", 5: "FAILED: no test was collected"}.get(code, f"FAILED (pytest {code})")


def why_missing(tier, tree, device):
    """None when ``tier`` can run here, else what would enable it, in one line."""
    if tier == "host" and tree is None:
        return f"set COMFYUI_DIR to a ComfyUI >= 0.33, or put one at {locate.cache_folder() / 'ComfyUI'}"
    if tier in ("gpu", "blackwell") and not device["cuda"]:
        return f"needs an NVIDIA GPU and a CUDA build of torch (torch here: {device['torch']})"
    if tier == "blackwell" and device["capability"][0] < 10:
        return "needs an NVIDIA GPU of compute capability 10.0 or higher (here {}.{})".format(*device["capability"])
    return None


def test_python(tree, named=None):
    """(interpreter, folder with the test tools or None). Raises ``environment.SetupError``."""
    runs = Path(named) if named else None
    if runs is None and not locate.missing_modules(sys.executable, (*locate.RUNS_COMFYUI, *TOOLS)):
        runs = Path(sys.executable)
    if runs is None and tree is not None:
        runs = locate.python_for(tree)
    if runs is None:
        return environment.ensure_venv(), None
    return runs, None if not locate.missing_modules(runs, TOOLS) else environment.ensure_tools(runs)

"""Which Python a command runs under, and going on under it."""

import os
import subprocess
import sys
from pathlib import Path

from . import environment, locate

ROOT = Path(__file__).resolve().parent.parent
_MARK = "H3_VORTEX_PYTHON"  # set for the process that goes on, so that one hand-over is the last


def add_arguments(parser):
    parser.add_argument("--comfyui", metavar="DIR", help="ComfyUI folder (default: COMFYUI_DIR, the tree this pack is in, the cache)")
    parser.add_argument(
        "--python", metavar="EXE", help="Python that runs ComfyUI; used as it is (default: the one found with it, else .venv here)"
    )


def for_comfyui(tree, named=None, say=print):
    """The interpreter to run ``tree`` with: ``named``, the one that already runs it, or our own (made when absent).

    Raises ``environment.SetupError`` when ``named`` cannot run ComfyUI, or when our own cannot be made.
    """
    if named:
        missing = locate.missing_modules(named)
        if missing:
            raise environment.SetupError(f"--python {named} cannot run ComfyUI: it has no {', '.join(missing)}.")
        return Path(named)
    return locate.python_for(tree, say) or environment.ensure_venv(say=say)


def is_this(python):
    """Whether this process already runs under ``python``."""
    return os.environ.get(_MARK) == str(python) or _same(python, sys.executable)


def go_on(python, command, arguments):
    """Run ``run.py command arguments`` under ``python``; returns its exit status. Does not return on Linux."""
    line = [str(python), str(ROOT / "run.py"), command, *map(str, arguments)]
    environ = {**os.environ, _MARK: str(python)}
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(line[0], line, environ)
    process = subprocess.Popen(line, env=environ)  # os.execve on Windows returns to the shell too early
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the console sends it to both; the one that does the work ends in order


def _same(one, other):
    return os.path.normcase(os.path.abspath(one)) == os.path.normcase(os.path.abspath(other))

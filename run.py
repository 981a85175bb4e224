#!/usr/bin/env python3
"""The front door of ComfyUI-H3-Vortex: ``python3 run.py demo``, ``python3 run.py test``, ``python3 run.py --help``.

Starts on a bare Python 3.10 or newer, on Linux and Windows. Where a command needs torch it goes on under the Python that
runs your ComfyUI, or under a ``.venv`` of its own; nothing is ever installed into somebody else's Python.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def load_pack(alias="h3_vortex"):
    """The pack as a package named ``alias``. Its folder stays off ``sys.path``: ``nodes`` would shadow ComfyUI's."""
    spec = importlib.util.spec_from_file_location(alias, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[alias])


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder and Path(folder).resolve() != ROOT]
    load_pack()
    from h3_vortex.frontdoor.cli import main

    sys.exit(main())

"""Loads the pack as ``h3_vortex`` for the benchmarks, wherever its folder is and whatever it is called.

The root never goes on ``sys.path``: ``nodes`` would shadow ComfyUI's own ``nodes.py``.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_pack(alias="h3_vortex"):
    if alias not in sys.modules:
        spec = importlib.util.spec_from_file_location(alias, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
        module = importlib.util.module_from_spec(spec)
        sys.modules[alias] = module
        spec.loader.exec_module(module)
    return sys.modules[alias]

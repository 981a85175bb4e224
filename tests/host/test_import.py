"""What may be imported where: the pack's folders never shadow ComfyUI's modules, in this process and in the server."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_comfyui_in_process_keeps_its_own_nodes(comfy):
    assert Path(comfy.nodes.__file__).parent == comfy.dir
    assert Path(importlib.util.find_spec("nodes").origin).parent == comfy.dir
    for name in ("kernels", "h3", "frontdoor"):
        assert importlib.util.find_spec(name) is None, f"{name} of the pack is importable at top level"


def test_pack_nodes_import_in_process(comfy):
    import h3_vortex.nodes as nodes

    assert Path(nodes.__file__).is_relative_to(ROOT)
    assert hasattr(nodes, "H3VortexExtension")

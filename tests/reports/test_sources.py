"""Reports whose cause was what a pack's code did at all: imports of other packs, copied core classes, pinned memory, stalls, compilers."""

import ast
import sys

import pytest
from h3_vortex.tests.conftest import ROOT

FOLDERS = ("kernels", "h3", "nodes")
PRODUCT = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("**/*.py"))]
# torch and numpy; ComfyUI with what its requirements.txt brings; what is optional and probed
ALLOWED = {
    "torch", "numpy", "safetensors", "tqdm", "aiohttp", "av", "PIL", "comfy", "comfy_api", "comfy_execution", "comfy_extras",
    "comfyui_version", "comfy_kitchen", "folder_paths", "nodes", "server", "triton", "diffusers", "transformers", "sageattention",
    "sageattn3", "flash_attn", "flash_attn_interface", "tokenizers",
}  # fmt: skip


def walk(path):
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def calls(path):
    return [(node.lineno, ast.unparse(node.func)) for node in walk(path) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_reports_78_79_no_import_of_another_pack(path):
    """And none by an absolute path: what is imported is the standard library, ComfyUI's own, or the pack by a relative import."""
    for node in walk(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
        for name in names:
            root = name.split(".")[0]
            assert root in ALLOWED or root in sys.stdlib_module_names, f"{path.name}:{node.lineno} imports {name}"
    assert not [line for line, name in calls(path) if name in ("sys.path.append", "sys.path.insert")]


def test_report_53_cores_packed_layout_is_never_built_here():
    """Its parameters are core's own affair; the runner reads the one that core built."""
    for path in PRODUCT:
        names = {node.id for node in walk(path) if isinstance(node, ast.Name)} | {
            n.attr for n in walk(path) if isinstance(n, ast.Attribute)
        }
        assert "PackedLayout" not in names, path.name


def test_reports_33_39_nothing_is_pinned():
    """Pinned pages are what dynamic VRAM runs out of; none of them are this pack's, so none are alive while a VAE decodes."""
    for path in PRODUCT:
        source = path.read_text(encoding="utf-8")
        assert "pin_memory" not in source and "cudaHostAlloc" not in source and "cudaHostRegister" not in source, path.name


def test_report_35_nothing_in_a_block_waits_for_the_device():
    """Only what measures or compares may wait, and that happens once, outside of the blocks."""
    may_wait = {"measure.py", "gemm_schedule.py", "checks.py", "record.py", "denoise.py", "verification.py", "cublaslt.py"}
    for path in PRODUCT:
        if path.name in may_wait or "kernels" not in path.parts:
            continue
        waits = ("synchronize", "record_stream", "empty_cache", *(("item", "tolist", "cpu") if "patch" in path.parts else ()))
        found = [(line, name) for line, name in calls(path) if name.rsplit(".", 1)[-1] in waits]
        assert not found, f"{path.name}: {found}"


def test_report_81_no_compiler_is_started_and_nothing_is_installed():
    """NVRTC, which torch ships, compiles in the process: no nvcc, no cl.exe, no Python.h, no pip."""
    for path in PRODUCT:
        started = [(line, name) for line, name in calls(path) if name.startswith("subprocess.") or name in ("os.system", "os.popen")]
        assert not started, f"{path.name}: {started}"
    assert not [p for p in ROOT.glob("*") if p.name in ("setup.py", "install.py", "prestartup_script.py")]


def test_report_65_no_module_of_core_is_written_to():
    """``comfy.x.y = ...`` and ``setattr(comfy.x, ...)``: the one exception is the compiler's switch, held for a call and put back."""
    for path in PRODUCT:
        for node in walk(path):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            for target in targets:
                text = ast.unparse(target)
                assert not text.startswith(("comfy.", "nodes.", "folder_paths.", "torch.")), f"{path.name}:{node.lineno} assigns {text}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                assert not ast.unparse(node.args[0]).startswith(("comfy", "core", "nodes", "torch")), f"{path.name}:{node.lineno}"

"""Fixtures of the host tier: one real ComfyUI server per session, and ComfyUI imported into the test process.

Import ComfyUI modules inside tests (after taking the ``comfy`` fixture), never at the top of a test file: collection
must work where there is no ComfyUI.

H3_REQUIRE=host  a missing ComfyUI is an error instead of a skip
H3_HOST_DEVICE   "cpu" (default) or "cuda": where the servers and the in-process ComfyUI compute
"""

import importlib
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from h3_vortex.benchmarks._comfy import first_sdpa_call
from h3_vortex.frontdoor import locate, torchvision_hook
from h3_vortex.frontdoor.server import prepare_base
from h3_vortex.tests.host.server import HostServer

HERE = Path(__file__).resolve().parent
ON_CPU = os.environ.get("H3_HOST_DEVICE", "cpu") == "cpu"


def find():
    """(tree, None) or (None, why the tier cannot run, in one line)."""
    try:
        tree = locate.find_comfyui()
    except locate.NotFound as error:
        return None, f"host tier: {error}"
    if tree is None:
        cache = locate.cache_folder() / "ComfyUI"
        return None, f"host tier: no ComfyUI >= 0.33: set COMFYUI_DIR to one, or put one at {cache}"
    missing = locate.missing_modules(sys.executable)
    if missing:
        return None, f"host tier: this Python lacks {', '.join(missing)}: run the tests with `python3 run.py test`"
    return tree, None


TREE, REASON = find()


def pytest_collection_modifyitems(items):
    required = "host" in os.environ.get("H3_REQUIRE", "").split(",")
    if REASON and required and any(HERE in Path(item.path).parents for item in items):
        raise pytest.UsageError(REASON)


@pytest.fixture(scope="session", autouse=True)
def comfyui_tree():
    """The ComfyUI tree under test (``locate.Tree``); skips the whole tier, in one line, when there is none."""
    if REASON:
        pytest.skip(REASON)
    return TREE


@pytest.fixture(scope="module", autouse=True)
def inference_mode(comfyui_tree):
    """Tests load and compute as ComfyUI's executor does: nothing is kept for a backward pass (a decode would keep every weight it casts).

    Per module, so that fixtures of a module are made under it too: tensors of both kinds do not mix.
    """
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def base_dir(comfyui_tree, tmp_path_factory):
    """ComfyUI base directory of the session: this pack as the only custom node. Its models come from ``tiny_models``."""
    return prepare_base(tmp_path_factory.mktemp("comfyui-base"))


@pytest.fixture(scope="session")
def tiny_models(base_dir):
    """The tiny random-weight H3 files, written once: ``{name: path}`` as ``h3.tiny.write_tiny_models`` names them."""
    from h3_vortex.h3.tiny import write_tiny_models

    return write_tiny_models(base_dir / "models", seed=0)


@pytest.fixture(scope="session")
def start_server(comfyui_tree, base_dir, tiny_models):
    """Context manager factory for further servers: ``with start_server("--bf16-unet") as server``.

    Keywords: ``base`` (another base directory), ``comfyui`` (another ComfyUI folder), ``cpu``.
    """

    @contextmanager
    def start(*flags, base=None, comfyui=None, cpu=ON_CPU):
        server = HostServer(comfyui or comfyui_tree.path, base or base_dir, flags=flags, cpu=cpu)
        with server:
            yield server

    return start


@pytest.fixture(scope="session")
def server(start_server):
    """The session's server. Tests share its queue and its cache: leave nothing running."""
    with start_server() as running:
        yield running


@pytest.fixture(scope="session")
def comfy(comfyui_tree, base_dir, tiny_models):
    """ComfyUI imported into this process, once, without a server.

    Returns ``dir`` (its folder), ``base``, ``models`` (with the tiny files) and the modules ``sd``, ``utils``, ``ops``,
    ``samplers``, ``model_management``, ``model_patcher``, ``folder_paths``, ``nodes``; anything else of ``comfy`` and
    ``comfy_extras`` can be imported in the test. ``h3_vortex.nodes`` imports from here on.
    """
    torchvision_hook.install()
    sys.path.insert(0, str(comfyui_tree.path))
    from comfy.cli_args import args  # reads no command line unless comfy.options says so

    args.cpu, args.base_directory, args.disable_api_nodes = ON_CPU, str(base_dir), True
    names = ("sd", "utils", "ops", "samplers", "model_management", "model_patcher")
    modules = {name: importlib.import_module(f"comfy.{name}") for name in names}
    modules |= {name: importlib.import_module(name) for name in ("folder_paths", "nodes")}
    loaded = SimpleNamespace(dir=comfyui_tree.path, base=base_dir, models=base_dir / "models", **modules)
    first_sdpa_call(loaded, loaded.model_management.get_torch_device())  # else the first test that compares two runs compares two kernels
    return loaded

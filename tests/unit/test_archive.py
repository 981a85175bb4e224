"""What the registry's archive holds: tracked files less .comfyignore. It must be enough to use the pack, and nothing else."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from h3_vortex.tests.conftest import ROOT

FOLDERS = {"csrc", "docs", "frontdoor", "h3", "kernels", "nodes", "requirements", "web", "workflows"}
FILES = {"CHANGELOG.md", "LICENSE", "README.md", "__init__.py", "pyproject.toml", "requirements.txt", "run.py"}
SUFFIXES = {"", ".py", ".cu", ".cuh", ".json", ".jpg", ".png", ".svg", ".md", ".txt", ".toml"}


def git(*arguments):
    return set(subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())


@pytest.fixture(scope="module")
def shipped():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone: what ships is decided by what is tracked")
    return git("ls-files") - git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore")


def test_it_holds_what_it_should_and_nothing_else(shipped):
    assert {path.split("/")[0] for path in shipped if "/" in path} == FOLDERS
    assert {path for path in shipped if "/" not in path} == FILES
    assert {Path(path).suffix for path in shipped} <= SUFFIXES
    assert not [path for path in shipped if path.startswith("workflows/source/")]
    assert sum((ROOT / path).stat().st_size for path in shipped if (ROOT / path).exists()) < 5_000_000
    for name in (path.stem for path in (ROOT / "workflows").glob("*.json")):
        assert {f"workflows/{name}.json", f"workflows/{name}.jpg", f"workflows/api/{name}.json"} <= shipped


def test_it_imports_and_its_front_door_opens(shipped, tmp_path):
    for path in shipped:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    # As ComfyUI imports it: by path, under a name that is no identifier; without ComfyUI there must be no error.
    script = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('a/b_x_c', sys.argv[1] + '/__init__.py', "
        "submodule_search_locations=[sys.argv[1]]); module = importlib.util.module_from_spec(spec); "
        "sys.modules[spec.name] = module; spec.loader.exec_module(module); print(module.WEB_DIRECTORY)"
    )
    run = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(run, cwd=tmp_path.parent, capture_output=True, text=True, check=True).stdout.strip() == "./web"
    for command in ("setup", "demo", "test", "queue", "bench", "check"):
        line = [sys.executable, str(tmp_path / "run.py"), command, "--help"]
        done = subprocess.run(line, cwd=tmp_path.parent, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)

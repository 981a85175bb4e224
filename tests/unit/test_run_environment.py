"""The pack's own environment: when it is remade, and the torchvision hook in it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from h3_vortex.frontdoor import environment, torchvision_hook


@pytest.fixture
def requirements(tmp_path):
    return Path(shutil.copytree(environment.REQUIREMENTS, tmp_path / "requirements"))


def test_hash_follows_every_file_and_the_python(requirements):
    seen = {environment.requirements_hash(requirements)}
    for name in environment.FILES:
        with open(requirements / name, "a") as file:
            file.write("# changed\n")
        seen.add(environment.requirements_hash(requirements))
    seen.add(environment.requirements_hash(requirements, (3, 99, 0)))
    assert len(seen) == len(environment.FILES) + 2


def test_hash_does_not_depend_on_line_ends(requirements):
    before = environment.requirements_hash(requirements)
    path = requirements / "torch.txt"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert environment.requirements_hash(requirements) == before


def test_every_requirement_file_is_hashed():
    assert {path.name for path in environment.REQUIREMENTS.iterdir()} == set(environment.FILES)


def test_a_finished_environment_is_left_alone(tmp_path):
    python = environment.venv_python(tmp_path / "venv")
    python.parent.mkdir(parents=True)
    python.write_text("never run")
    assert not environment.is_current(tmp_path / "venv")
    (tmp_path / "venv" / environment.STAMP).write_text(json.dumps({"requirements": "older"}))
    assert not environment.is_current(tmp_path / "venv")
    (tmp_path / "venv" / environment.STAMP).write_text(json.dumps({"requirements": environment.requirements_hash()}))
    assert environment.ensure_venv(tmp_path / "venv", say=pytest.fail) == python


def test_a_python_that_is_too_old_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "PYTHONS", ((3, 90), (3, 91)))
    with pytest.raises(environment.SetupError, match=r"Python 3\.90 to 3\.91 is needed"):
        environment.ensure_venv(tmp_path / "venv", say=pytest.fail)
    assert not (tmp_path / "venv").exists()


def test_a_failed_pip_is_reported_with_its_command(monkeypatch):
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, 1))
    with pytest.raises(environment.SetupError, match="pip failed with code 1: .*some-package"):
        environment._pip("python", "some-package", say=lambda line: None)


FAKE_TORCHVISION = {
    "__init__.py": "from . import extension\nfrom . import _meta_registrations\n",
    "extension.py": "def _has_ops():\n    return {has_ops}\n",
    "_meta_registrations.py": "import torch\nnms = torch.library.defined\n",
}
FAKE_TORCH = "class library:\n    defined = []\n    class Library:\n        def __init__(self, *a): pass\n"
FAKE_TORCH += "        def define(self, schema): library.defined.append(schema)\n"


@pytest.mark.parametrize("has_ops", [False, True])
def test_hook_defines_the_schemas_only_without_the_cpp_half_and_never_early(tmp_path, has_ops):
    (tmp_path / "torchvision").mkdir()
    for name, text in FAKE_TORCHVISION.items():
        (tmp_path / "torchvision" / name).write_text(text.format(has_ops=has_ops))
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    shutil.copy(torchvision_hook.__file__, tmp_path / "hook.py")
    code = (
        "import hook, sys; hook.install(); hook.install()\n"
        "assert sum(type(f).__name__ == '_Finder' for f in sys.meta_path) == 1 and 'torch' not in sys.modules\n"
        "import torchvision\n"
        "assert not any(type(f).__name__ == '_Finder' for f in sys.meta_path)\n"
        "print(len(torchvision._meta_registrations.nms))\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (0 if has_ops else len(torchvision_hook.SCHEMAS))

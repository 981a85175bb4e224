"""The pack's own ``.venv``: made from ``requirements/``, left alone while those files stay the same."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from . import torchvision_hook

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
FILES = ("torch.txt", "comfyui.txt", "diffusers.txt", "test-tools.txt", "test.txt", "torch-companions.txt", "constraints.txt")
STAMP = "h3-vortex.json"
HOOK_MODULE = "h3_vortex_torchvision"
PYTHONS = ((3, 11), (3, 14))  # for which every pinned package has a release


class SetupError(RuntimeError):
    """The environment could not be made; the message says which step failed and what to do."""


def venv_python(venv):
    return Path(venv) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def requirements_hash(folder=REQUIREMENTS, python=None):
    """Hex digest over the requirement files, this module's hook and the Python version (default: the running one)."""
    digest = hashlib.sha256(repr(tuple(python or sys.version_info[:3])).encode())
    for path in [*(Path(folder) / name for name in FILES), Path(torchvision_hook.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()


def is_current(venv, wanted=None):
    """Whether ``venv`` was finished by :func:`ensure_venv` from the requirement files as they are now."""
    stamp = Path(venv) / STAMP
    if not stamp.exists() or not venv_python(venv).exists():
        return False
    return json.loads(stamp.read_text(encoding="utf-8")).get("requirements") == (wanted or requirements_hash())


def ensure_venv(venv=ROOT / ".venv", say=print):
    """Make or bring up to date the pack's own environment; returns its interpreter. Raises :class:`SetupError`.

    It can run ComfyUI 0.33.0 (API only), the embedded engine, and every test tier that needs no accelerator.
    """
    venv, python = Path(venv), venv_python(venv)
    if is_current(venv):
        return python
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        low, high = (".".join(map(str, version)) for version in PYTHONS)
        raise SetupError(f"Python {low} to {high} is needed for the packages here; this one is {sys.version.split()[0]}.")
    say(f"Making {venv}: torch and what ComfyUI needs, 1.8 GB with a CPU build of torch. This happens once.")
    if not python.exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
        if made.returncode:
            shutil.rmtree(venv, ignore_errors=True)
            raise SetupError(
                f"{sys.executable} -m venv failed: {(made.stdout + made.stderr).strip()}\n"
                "On Debian and Ubuntu, install the package python3-venv."
            )
    _pip(python, "-r", REQUIREMENTS / "torch.txt", say=say)
    constraint = ("-c", REQUIREMENTS / "constraints.txt")
    together = [part for name in ("comfyui.txt", "diffusers.txt", "test.txt") for part in ("-r", REQUIREMENTS / name)]
    _pip(python, *constraint, *together, say=say)
    _pip(python, "--no-deps", "-r", REQUIREMENTS / "torch-companions.txt", say=say)
    install_hook(python)
    _drop_unloadable_torchaudio(python)
    build = output(python, "import torch; print(torch.__version__, torch.version.cuda or 'no CUDA')")
    stamp = {"requirements": requirements_hash(), "torch": build}
    (venv / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    say(f"{venv} is ready: torch {build}.")
    return python


def ensure_tools(python, folder=ROOT / ".test-packages", say=print):
    """Install the test tools into ``folder`` for an interpreter that is not ours; returns the folder.

    With --target and --no-deps: nothing goes into that interpreter and its torch stays.
    """
    stamp = Path(folder) / STAMP
    wanted = requirements_hash(python=output(python, "import sys; print(sys.version_info[:3])"))
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")).get("requirements") == wanted:
        return Path(folder)
    say(f"Putting the test tools for {python} into {folder}.")
    shutil.rmtree(folder, ignore_errors=True)
    _pip(python, "--target", folder, "--no-deps", "-r", REQUIREMENTS / "test-tools.txt", say=say)
    stamp.write_text(json.dumps({"requirements": wanted}) + "\n", encoding="utf-8")
    return Path(folder)


def install_hook(python):
    """Put ``torchvision_hook`` into the site-packages of ``python``, called at its start. Only for our own ``.venv``."""
    site = Path(output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    shutil.copyfile(torchvision_hook.__file__, site / f"{HOOK_MODULE}.py")
    (site / f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}; {HOOK_MODULE}.install()\n", encoding="utf-8")


def _drop_unloadable_torchaudio(python):
    """torchaudio works without its C++ half but not with one that cannot load (a CUDA wheel beside a CPU torch)."""
    if subprocess.run([str(python), "-c", "import torchaudio"], capture_output=True).returncode == 0:
        return
    site = Path(output(python, "import sysconfig; print(sysconfig.get_path('platlib'))"))
    for library in (site / "torchaudio" / "lib").glob("_torchaudio*"):
        library.unlink()
    output(python, "import torchaudio")


def _pip(python, *arguments, say):
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    say("  pip install " + " ".join(Path(argument).name for argument in map(str, arguments)))
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SetupError(
            f"pip failed with code {done.returncode}: {' '.join(command)}\n"
            "Run that line by hand to see more; a package index must be reachable, or pip configured for a local one."
        )


def output(python, code):
    """What ``python`` prints for ``code``, stripped. Raises :class:`SetupError` when it fails."""
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"{python} failed on {code!r}:\n{done.stderr.strip()}")
    return done.stdout.strip()

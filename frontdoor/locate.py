"""Find a ComfyUI tree, and the Python that already runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMFYUI_TAG = "v0.33.0"
COMFYUI_REPOSITORY = "https://github.com/Comfy-Org/ComfyUI"
NEEDS = (0, 33, 0)
# Import names of what ComfyUI 0.33 cannot start without; a Python that has torch but not these runs something else.
RUNS_COMFYUI = ("torch", "torchvision", "torchaudio", "torchsde", "aiohttp", "av", "comfy_kitchen", "safetensors",
                "transformers", "sqlalchemy", "alembic", "tqdm", "yaml", "PIL", "einops")  # fmt: skip


class NotFound(RuntimeError):
    """No ComfyUI, or one that cannot be used; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Tree:
    """A ComfyUI checkout. path: folder with main.py. version: three ints. how: where it was found, in words."""

    path: Path
    version: tuple
    how: str

    def describe(self):
        return f"ComfyUI {'.'.join(map(str, self.version))} at {self.path} ({self.how})"


def cache_folder(environ=os.environ):
    """The pack's cache: ``%LOCALAPPDATA%\\h3-vortex`` on Windows, ``~/.cache/h3-vortex`` elsewhere."""
    if os.name == "nt" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "h3-vortex"
    return Path.home() / ".cache" / "h3-vortex"


def comfyui_version(folder):
    """(major, minor, patch) of the ComfyUI in ``folder``, or None when there is none."""
    folder = Path(folder)
    if not all((folder / name).exists() for name in ("main.py", "nodes.py", "folder_paths.py", "comfy")):
        return None
    stamp = folder / "comfyui_version.py"
    match = re.search(r"\d+\.\d+\.\d+", stamp.read_text(encoding="utf-8")) if stamp.exists() else None
    return tuple(int(part) for part in match[0].split(".")) if match else (0, 0, 0)


def named_tree(folder, how):
    """The tree in a folder that the user named. Raises :class:`NotFound` when it is none, or is too old."""
    # The portable distribution has main.py one level down.
    for path in (Path(folder).expanduser(), Path(folder).expanduser() / "ComfyUI"):
        version = comfyui_version(path)
        if version is None:
            continue
        if version < NEEDS:
            old, new = ".".join(map(str, version)), ".".join(map(str, NEEDS))
            raise NotFound(f"{how}: the ComfyUI at {path} is {old}; MiniMax H3 needs {new} or newer. Update it.")
        return Tree(path.resolve(), version, how)
    raise NotFound(f"{how}: {folder} is no ComfyUI folder (it has no main.py, nodes.py and comfy/).")


def places(pack=None, environ=os.environ):
    """The places looked at without being told, in order: (folder, how)."""
    # The unresolved path first: the pack may be a link in custom_nodes.
    for parent in dict.fromkeys((Path(os.path.abspath(pack or ROOT)).parent, Path(pack or ROOT).resolve().parent)):
        if parent.name == "custom_nodes":
            yield parent.parent, "the tree this pack is installed in"
    yield cache_folder(environ) / "ComfyUI", "the cache"


def find_comfyui(explicit=None, environ=os.environ, pack=None):
    """The tree to use, without touching the network, or None.

    Order: ``explicit`` (``--comfyui``), ``COMFYUI_DIR``, the tree the pack is installed in, the cache. One that the
    user named and that cannot be used raises :class:`NotFound`; an unusable one in the other places is passed over.
    """
    if explicit:
        return named_tree(explicit, "--comfyui")
    if environ.get("COMFYUI_DIR"):
        return named_tree(environ["COMFYUI_DIR"], "COMFYUI_DIR")
    for folder, how in places(pack, environ):
        version = comfyui_version(folder)
        if version is not None and version >= NEEDS:
            return Tree(folder.resolve(), version, how)
    return None


def clone_comfyui(environ=os.environ, repository=COMFYUI_REPOSITORY, say=print):
    """Clone the pinned tag into the cache. Raises :class:`NotFound` within seconds when there is no network."""
    target = cache_folder(environ) / "ComfyUI"
    if target.exists():
        raise NotFound(f"{target} exists but holds no ComfyUI {'.'.join(map(str, NEEDS))} or newer; move it away.")
    if shutil.which("git") is None:
        raise NotFound("git is not installed, so ComfyUI could not be fetched.")
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "SSH_ASKPASS": ""}
    git = ["git", "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=20"]
    say(f"No ComfyUI here; asking {repository} for {COMFYUI_TAG} ...")
    try:
        # Cheap, so it can have a short limit: a clone may rightly take minutes, an answer may not.
        subprocess.run([*git, "ls-remote", "--exit-code", "--tags", repository, COMFYUI_TAG], env=quiet, timeout=15,
                       check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotFound(f"{repository} did not answer within 15 s.") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"git ended with code {error.returncode}"])[-1]
        raise NotFound(f"{repository} could not be reached: {reason}") from None
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="ComfyUI-", dir=target.parent))
    try:
        cloned = subprocess.run([*git, "clone", "--depth", "1", "--branch", COMFYUI_TAG, repository, str(part)],
                                env=quiet, stdin=subprocess.DEVNULL)  # fmt: skip
        if cloned.returncode:
            raise NotFound(f"git clone of {repository} {COMFYUI_TAG} failed with code {cloned.returncode}.")
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return named_tree(target, "cloned into the cache")


def require_comfyui(explicit=None, environ=os.environ, pack=None, say=print):
    """:func:`find_comfyui`, else :func:`clone_comfyui`; the :class:`NotFound` it raises tells the ways out."""
    tree = find_comfyui(explicit, environ, pack)
    if tree is not None:
        return tree
    try:
        return clone_comfyui(environ, say=say)
    except NotFound as error:
        looked = "\n".join(f"  - {folder} ({how})" for folder, how in places(pack, environ))
        raise NotFound(
            f"No ComfyUI {'.'.join(map(str, NEEDS))} or newer was found, and none could be fetched: {error}\n"
            f"Looked at --comfyui and COMFYUI_DIR (not set) and\n{looked}\n"
            "Do one of these, then run the command again:\n"
            "  - name your ComfyUI folder (the one with main.py): --comfyui DIR, or set COMFYUI_DIR=DIR\n"
            "  - put this pack into its custom_nodes folder and run it from there\n"
            f"  - on a machine with a network: git clone --branch {COMFYUI_TAG} {COMFYUI_REPOSITORY}\n"
            f"    and copy it to {cache_folder(environ) / 'ComfyUI'}"
        ) from None


def pythons_of(tree):
    """Interpreters that may already run ``tree``, in order: its virtual environments, the portable one, this one."""
    scripts, exe = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    found = [tree.path / name / scripts / exe for name in ("venv", ".venv")]
    found += [parent / "python_embeded" / "python.exe" for parent in (tree.path, tree.path.parent)]
    return [path for path in found if path.exists()] + [Path(sys.executable)]


def missing_modules(python, modules=RUNS_COMFYUI, timeout=60):
    """The names in ``modules`` that ``python`` cannot find (nothing is imported); all of them when it does not run."""
    code = "import importlib.util as u, json, sys; print(json.dumps([m for m in sys.argv[1:] if u.find_spec(m) is None]))"
    try:
        done = subprocess.run([str(python), "-I", "-c", code, *modules], capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return list(modules)
    return json.loads(done.stdout) if done.returncode == 0 else list(modules)


def python_for(tree, say=print):
    """The first interpreter of :func:`pythons_of` that has all ComfyUI needs, or None. Installs nothing."""
    for python in pythons_of(tree):
        missing = missing_modules(python)
        if not missing:
            return python
        if "torch" not in missing:
            say(f"{python} has torch but not {', '.join(missing)}; not using it.")
    return None

"""What the pack remembers between runs, on disk: compiled kernels, verification verdicts, measured choices.

Files are written to a temporary name and renamed, so that a reader never sees half of one, and every reader treats a missing,
corrupt or foreign file as absent. A directory that cannot be written costs one log line and the memory of this run only.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

log = logging.getLogger("h3_vortex")
_warned_unwritable: set[str] = set()


def cache_dir() -> Path:
    """``H3_VORTEX_CACHE``, else ``%LOCALAPPDATA%\\h3-vortex`` on Windows, else ``$XDG_CACHE_HOME`` or ``~/.cache`` / h3-vortex.

    Raises OSError when none of them is set and the user has no home folder.
    """
    chosen = os.environ.get("H3_VORTEX_CACHE")
    if chosen:
        return Path(chosen)
    windows = sys.platform == "win32"
    base = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME")
    if not base:
        try:
            home = Path.home()
        except RuntimeError as error:  # a container's user without an entry and without HOME
            raise OSError("this user has no home folder; set H3_VORTEX_CACHE") from error
        base = home / ("AppData/Local" if windows else ".cache")
    return Path(base) / "h3-vortex"


def digest(*parts) -> str:
    """SHA-256 (hex) over the parts' bytes, each preceded by its length so that no two part lists share a digest."""
    h = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def version(distribution: str) -> str:
    """Version of an installed distribution, "none" when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def sources() -> str:
    """Hash of this pack's kernels and of what decides about them: belongs to the key of everything that was measured or compared."""
    root = Path(__file__).resolve().parent
    files = sorted([*root.glob("**/*.py"), *(root.parent / "csrc").glob("*")])
    return digest(*(file.read_bytes() for file in files if file.is_file()))


def read_bytes(kind: str, name: str) -> bytes | None:
    """The file ``kind/name``, or None when it is missing, unreadable or fails its own checksum (the first 32 bytes)."""
    try:
        data = (cache_dir() / kind / name).read_bytes()
    except OSError:
        return None
    body = data[32:]
    return body if len(data) > 32 and hashlib.sha256(body).digest() == data[:32] else None


def write_bytes(kind: str, name: str, body: bytes) -> bool:
    """Store ``body`` under ``kind/name`` atomically; False (and one log line per directory) when that is not possible."""
    folder, temporary = kind, None
    try:
        folder = cache_dir() / kind
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=name + ".", suffix=".part", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(temporary, folder / name)
        return True
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if str(folder) not in _warned_unwritable:
            _warned_unwritable.add(str(folder))
            log.warning("H3 Vortex: cache folder %s cannot be written (%s); results are kept for this run only", folder, error)
        return False


def read_json(kind: str, name: str, version: int) -> dict | None:
    """The JSON object stored by :func:`write_json` with the same ``version``, else None."""
    body = read_bytes(kind, name)
    if body is None:
        return None
    try:
        document = json.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("version") != version or not isinstance(document.get("data"), dict):
        return None
    return document["data"]


def write_json(kind: str, name: str, version: int, data: dict) -> bool:
    return write_bytes(kind, name, json.dumps({"version": version, "data": data}, sort_keys=True).encode())

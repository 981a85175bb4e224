"""Start a real ComfyUI server on a free loopback port with only this pack in it, and stop it by its process id."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACK_FOLDER = "ComfyUI-H3-Vortex"
BASE_FOLDERS = ("custom_nodes", "input", "output", "temp", "user", "models")
# What a copy of the pack leaves out where links are not allowed (Windows without developer mode).
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "demo_output", "output", ".scratch", ".test-packages")
# Runs main.py in the same process, which Linux then ends together with its parent, however that one ends (prctl 1 = PR_SET_PDEATHSIG).
WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class ServerError(RuntimeError):
    """The server did not come up, or died; the message ends with the tail of its log."""


def prepare_base(base):
    """Make a ComfyUI base directory (models, input, output, user, ...) whose only custom node is this pack; return it.

    ``base`` is what ComfyUI takes as ``--base-directory``; it is created when absent.
    """
    base = Path(base)
    for folder in BASE_FOLDERS:
        (base / folder).mkdir(parents=True, exist_ok=True)
    link = base / "custom_nodes" / PACK_FOLDER
    if not link.exists():
        try:
            link.symlink_to(ROOT, target_is_directory=True)
        except OSError:
            shutil.copytree(ROOT, link, ignore=NOT_COPIED)
    return base


def free_port():
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One ComfyUI process. Use as a context manager, or call :meth:`start` and :meth:`stop`.

    comfyui: folder with ``main.py``. base: prepared by :func:`prepare_base`. python: interpreter with torch.
    flags: further command line flags, after (and so above) the ones set here. cpu: run without an accelerator.
    """

    def __init__(self, comfyui, base, python=sys.executable, flags=(), cpu=True):
        self.comfyui, self.base, self.python = Path(comfyui), Path(base), str(python)
        self.flags, self.cpu = tuple(flags), cpu
        self.port, self.process, self.log_path, self._log_file, self._frontend = None, None, None, None, None
        self.start_seconds = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self):
        """Everything the server has written so far (stdout and stderr)."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path else ""

    def command(self):
        flags = [
            "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(self.base),
            "--disable-auto-launch", "--disable-api-nodes", "--database-url", "sqlite:///:memory:",
            # The API needs no web page, so its package need not be installed: any folder with an index.html serves.
            "--front-end-root", str(self._frontend),
            # Also keeps out custom nodes that an extra_model_paths.yaml beside main.py may point at.
            "--disable-all-custom-nodes", "--whitelist-custom-nodes", PACK_FOLDER,
        ]  # fmt: skip
        wrapped = ["-c", WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
        return [self.python, *wrapped, "main.py", *flags, *(["--cpu"] if self.cpu else []), *self.flags]

    def start(self, timeout=300):
        """Start and wait until the HTTP API answers. Raises :class:`ServerError` when it dies or takes too long."""
        began = time.monotonic()
        self.port = free_port()
        self._frontend = Path(tempfile.mkdtemp(prefix="h3-vortex-web-"))
        (self._frontend / "index.html").write_text("<title>ComfyUI, API only</title>", encoding="utf-8")
        self.log_path = self.base / f"server-{self.port}.log"
        self._log_file = open(self.log_path, "wb")
        try:
            self.process = subprocess.Popen(
                self.command(),
                cwd=self.comfyui,
                stdin=subprocess.DEVNULL,
                stdout=self._log_file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
                # Its own group: Ctrl-C in the terminal reaches us, and we stop it in order.
                start_new_session=os.name != "nt",
                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP if os.name == "nt" else 0,
            )
            while True:
                try:
                    self.get_json("/system_stats", timeout=5)
                    break
                except (urllib.error.URLError, OSError, json.JSONDecodeError):
                    if self.process.poll() is not None:
                        raise ServerError(f"ComfyUI ended with code {self.process.returncode}.\n{self.tail()}") from None
                    if time.monotonic() - began > timeout:
                        raise ServerError(f"ComfyUI did not answer within {timeout} s.\n{self.tail()}") from None
                    time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def stop(self):
        """End the process (terminate, then kill after ten seconds). The log stays readable."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._log_file is not None:
            self._log_file.close()
        if self._frontend is not None:
            shutil.rmtree(self._frontend, ignore_errors=True)

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc):
        self.stop()

    def get_json(self, path, timeout=30):
        # An empty ProxyHandler: a proxy set for the outside must not swallow a loopback request.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, timeout=timeout) as reply:
            return json.load(reply)

    def tail(self, lines=30):
        return "\n".join(self.log.splitlines()[-lines:])

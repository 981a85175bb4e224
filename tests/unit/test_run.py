"""``run.py`` itself: it starts on a bare Python, its table of commands, the tiers, and what it keeps off sys.path."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from h3_vortex.frontdoor import cli, cmd_test, interpreter, locate
from h3_vortex.frontdoor.server import PACK_FOLDER, Server, ServerError, prepare_base

ROOT = Path(__file__).resolve().parents[2]


def run_py(*arguments, **kwargs):
    # -I -S: no site-packages, so only the standard library is there.
    line = [sys.executable, "-I", "-S", str(ROOT / "run.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **kwargs)


def test_starts_without_any_package():
    done = run_py("--help")
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout
        assert run_py(name, "--help").returncode == 0


def test_unknown_command_is_a_usage_error():
    assert run_py("fly").returncode == 2


def test_every_command_has_help_and_says_what_it_does():
    for module in cli.COMMANDS.values():
        assert module.HELP and module.__doc__ and callable(module.run) and callable(module.add_arguments)


def test_folders_of_the_pack_are_not_importable_at_top_level():
    assert ROOT not in [Path(folder).resolve() for folder in sys.path if folder]
    for name in ("nodes", "kernels", "h3", "frontdoor"):
        spec = importlib.util.find_spec(name)
        assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT), name


def test_running_run_py_does_not_make_them_importable():
    code = (
        "import runpy, sys, importlib.util\n"
        "sys.argv = [sys.argv[1], '--help']\n"
        "sys.path.insert(0, sys.argv[0][:-len('/run.py')])\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([name for name in ('nodes', 'kernels', 'h3', 'frontdoor') if importlib.util.find_spec(name)])\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT / "run.py")], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_pack_is_importable_without_comfyui():
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])['load_pack']()\n"
        "import h3_vortex, inspect\n"
        "assert h3_vortex.WEB_DIRECTORY and inspect.iscoroutinefunction(h3_vortex.comfy_entrypoint)\n"
        "assert not {'torch', 'comfy', 'nodes', 'comfy_api'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT / "run.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pytest_is_started_without_the_root_on_the_path(tmp_path):
    (tmp_path / "pytest.py").write_text("import sys\ndef main():\n    print(sys.path, sys.argv[1:]); return 3\n")
    line = [sys.executable, "-c", cmd_test.PYTEST, str(ROOT), str(tmp_path), "tests/unit"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    assert repr(str(ROOT)) not in done.stdout and "''" not in done.stdout.split("]")[0]
    assert done.stdout.endswith("['tests/unit']\n")


CPU = {"torch": "2.13.0+cpu", "cuda": False}
HOPPER = {"torch": "2.13.0+cu130", "cuda": True, "name": "GPU", "capability": [9, 0]}
BLACKWELL = HOPPER | {"capability": [12, 0]}
TREE = locate.Tree(Path("x"), (0, 33, 0), "test")


@pytest.mark.parametrize(
    "tier, tree, device, says",
    [
        ("unit", None, CPU, None),
        ("host", TREE, CPU, None),
        ("host", None, CPU, "set COMFYUI_DIR"),
        ("gpu", TREE, CPU, "needs an NVIDIA GPU and a CUDA build of torch (torch here: 2.13.0+cpu)"),
        ("gpu", TREE, HOPPER, None),
        ("blackwell", TREE, CPU, "needs an NVIDIA GPU"),
        ("blackwell", TREE, HOPPER, "capability 10.0 or higher (here 9.0)"),
        ("blackwell", TREE, BLACKWELL, None),
    ],
)
def test_missing_tiers_say_in_one_line_what_enables_them(tier, tree, device, says):
    missing = cmd_test.why_missing(tier, tree, device)
    assert missing is None if says is None else says in missing and "\n" not in missing


def test_the_tiers_that_can_run_are_run(monkeypatch, capsys):
    """Which tiers are run, and the exit status, with pytest itself replaced."""

    def run(require="", code=0, tree=None):
        started = []

        def fake(command, **kwargs):
            started.append([part for part in command if part.startswith("tests/")][0])
            if kwargs["stdout"] is not None:
                kwargs["stdout"].write(f"what {started[-1]} says")
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setenv("H3_REQUIRE", require)
        monkeypatch.setattr(cmd_test.locate, "find_comfyui", lambda explicit: tree)
        monkeypatch.setattr(cmd_test, "test_python", lambda tree, named: (sys.executable, None))
        monkeypatch.setattr(cmd_test.environment, "output", lambda python, code: '{"torch": "x", "cuda": false}')
        monkeypatch.setattr(cmd_test.subprocess, "run", fake)
        return cmd_test.run(cli.parser().parse_args(["test"])), started, capsys.readouterr().out

    status, started, out = run()
    assert status == 0 and started == ["tests/unit"]
    assert "host       not run: set COMFYUI_DIR" in out and "unit       passed" in out
    status, _, out = run(require="host")
    assert status == 1 and "host       MISSING, and H3_REQUIRE asks for it" in out
    assert run(code=1)[0] == 1
    status, _, out = run(code=5)
    assert status == 1 and "no test was collected" in out
    with pytest.raises(Exception, match="the tiers are unit, host"):
        run(require="hots")
    monkeypatch.setattr(cmd_test.os, "cpu_count", lambda: 2)
    tree = SimpleNamespace(path="there", describe=lambda: "a ComfyUI")
    status, started, out = run(tree=tree, require="host")
    assert status == 0 and sorted(started) == ["tests/host", "tests/host/workflows", "tests/unit"]
    said = ["== tests/host", "what tests/unit says", "what tests/host/workflows says", "host       passed"]
    assert [out.index(text) for text in said] == sorted(out.index(text) for text in said)
    assert run(tree=tree, code=1)[0] == 1
    monkeypatch.setattr(cmd_test.os, "cpu_count", lambda: 1)
    assert run(tree=tree)[1] == ["tests/unit", "tests/host"]


@pytest.mark.parametrize("codes, code", [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((0, 5), 0), ((5, 1), 1), ((5, 5), 5), ((2, 0), 2)])
def test_a_tier_in_two_parts(codes, code):
    assert cmd_test.both((codes[0], 3.0), (codes[1], 4.0)) == (code, 7.0)


def test_the_parts_of_the_host_tier_exist():
    assert all((ROOT / path).exists() for path in cmd_test.VIDEOS)


def test_arguments_after_two_dashes_go_to_pytest():
    assert cli.parser().parse_args(["test", "--", "-k", "x"]).pytest == ["-k", "x"]


def test_base_directory_has_only_this_pack(tmp_path):
    base = prepare_base(prepare_base(tmp_path / "base"))
    assert [path.name for path in (base / "custom_nodes").iterdir()] == [PACK_FOLDER]
    assert (base / "custom_nodes" / PACK_FOLDER / "run.py").exists()


def test_base_directory_gets_a_copy_where_links_are_not_allowed(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    pack = prepare_base(tmp_path / "base") / "custom_nodes" / PACK_FOLDER
    assert (pack / "__init__.py").exists() and not (pack / ".git").exists() and not (pack / ".venv").exists()


def test_a_server_that_dies_says_why_and_leaves_nothing(tmp_path):
    (tmp_path / "main.py").write_text("print('the reason'); raise SystemExit(7)")
    server = Server(tmp_path, prepare_base(tmp_path / "base"))
    with pytest.raises(ServerError, match=r"ended with code 7.\nthe reason"):
        server.start()
    assert server.process.poll() == 7 and not server._frontend.exists()


def test_a_server_that_never_answers_is_stopped(tmp_path):
    (tmp_path / "main.py").write_text("import time; time.sleep(600)")
    server = Server(tmp_path, prepare_base(tmp_path / "base"))
    with pytest.raises(ServerError, match="did not answer within 1 s"):
        server.start(timeout=1)
    assert server.process.poll() is not None


def test_one_handover_is_the_last(monkeypatch, tmp_path):
    assert interpreter.is_this(sys.executable)
    assert not interpreter.is_this(tmp_path / "python")
    monkeypatch.setenv(interpreter._MARK, str(tmp_path / "python"))
    assert interpreter.is_this(tmp_path / "python")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is a signal on Linux only")
def test_a_server_ends_with_a_parent_that_is_killed(tmp_path):
    """Killed outright, the parent can stop nothing itself: a test run out of memory, a closed terminal."""
    (tmp_path / "main.py").write_text(
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b'{}')\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()\n"
    )
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1])['load_pack']()\n"
        "from h3_vortex.frontdoor.server import Server, prepare_base\n"
        "server = Server(sys.argv[2], prepare_base(sys.argv[2] + '/base')).start()\n"
        "print(server.process.pid, flush=True); input()\n"
    )
    line = [sys.executable, "-c", code, str(ROOT / "run.py"), str(tmp_path)]
    parent = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    server = Path("/proc") / parent.stdout.readline().strip()
    assert "main.py" in (server / "cmdline").read_text()
    parent.kill()
    parent.communicate()
    for _ in range(100):
        if not server.exists() or "State:\tZ" in (server / "status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the server outlived its parent")

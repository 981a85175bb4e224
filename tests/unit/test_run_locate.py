"""Finding ComfyUI and its Python: the order, what is refused, and what is said when nothing is found."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from h3_vortex.frontdoor import locate


def make_comfyui(folder, version="0.33.0"):
    (folder / "comfy").mkdir(parents=True)
    for name in ("main.py", "nodes.py", "folder_paths.py"):
        (folder / name).write_text("")
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder: no cache, no COMFYUI_DIR."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    return tmp_path / "home"


def test_order_is_option_environment_own_tree_cache(home, tmp_path):
    option = make_comfyui(tmp_path / "option")
    environment = make_comfyui(tmp_path / "environment")
    tree = make_comfyui(tmp_path / "tree")
    pack = tree / "custom_nodes" / "pack"
    pack.mkdir(parents=True)
    cache = make_comfyui(home / ".cache" / "h3-vortex" / "ComfyUI")
    env = {"COMFYUI_DIR": str(environment)}
    assert locate.find_comfyui(option, env, pack).path == option
    assert locate.find_comfyui(None, env, pack).path == environment
    assert locate.find_comfyui(None, {}, pack).path == tree
    assert locate.find_comfyui(None, {}, tmp_path / "elsewhere").path == cache
    assert locate.find_comfyui(None, {}, pack).how == "the tree this pack is installed in"


def test_nothing_found_is_none(home, tmp_path):
    assert locate.find_comfyui(None, {}, tmp_path) is None


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_a_pack_linked_into_custom_nodes_finds_that_tree(home, tmp_path):
    tree = make_comfyui(tmp_path / "tree")
    (tmp_path / "pack").mkdir()
    (tree / "custom_nodes").mkdir()
    (tree / "custom_nodes" / "link").symlink_to(tmp_path / "pack")
    assert locate.find_comfyui(None, {}, tree / "custom_nodes" / "link").path == tree


def test_portable_folder_is_accepted(home, tmp_path):
    inner = make_comfyui(tmp_path / "ComfyUI_windows_portable" / "ComfyUI")
    assert locate.find_comfyui(inner.parent, {}).path == inner


def test_a_named_folder_that_is_none_is_refused_not_passed_over(home, tmp_path):
    make_comfyui(home / ".cache" / "h3-vortex" / "ComfyUI")
    with pytest.raises(locate.NotFound, match="--comfyui: .*is no ComfyUI folder"):
        locate.find_comfyui(tmp_path / "nowhere", {})
    with pytest.raises(locate.NotFound, match="COMFYUI_DIR: .*is no ComfyUI folder"):
        locate.find_comfyui(None, {"COMFYUI_DIR": str(tmp_path)})


def test_an_old_one_is_refused_when_named_and_passed_over_when_not(home, tmp_path):
    old = make_comfyui(home / ".cache" / "h3-vortex" / "ComfyUI", "0.32.1")
    with pytest.raises(locate.NotFound, match=r"is 0\.32\.1; MiniMax H3 needs 0\.33\.0 or newer"):
        locate.find_comfyui(old, {})
    assert locate.find_comfyui(None, {}, tmp_path) is None


@pytest.mark.parametrize("version, parsed", [("0.33.0", (0, 33, 0)), ("0.100.12", (0, 100, 12)), ("odd", (0, 0, 0))])
def test_version(tmp_path, version, parsed):
    assert locate.comfyui_version(make_comfyui(tmp_path / "c", version)) == parsed


def test_no_folder_has_no_version(tmp_path):
    assert locate.comfyui_version(tmp_path) is None


def git_that(tmp_path, monkeypatch, body):
    """Put a ``git`` first on PATH that runs the Python ``body``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    git = folder / "git"
    git.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    git.chmod(git.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(os.name == "nt", reason="a script named git is no program on Windows")
class TestClone:
    def test_offline_message_says_what_is_missing_and_what_to_do(self, home, tmp_path, monkeypatch):
        git_that(tmp_path, monkeypatch, "print('fatal: Could not resolve host', file=sys.stderr); sys.exit(128)")
        began = time.monotonic()
        with pytest.raises(locate.NotFound) as raised:
            locate.require_comfyui(None, {}, tmp_path, say=lambda line: None)
        assert time.monotonic() - began < 10
        text = str(raised.value)
        for part in ("Could not resolve host", "--comfyui DIR", "COMFYUI_DIR=DIR", "custom_nodes", "git clone --branch v0.33.0"):
            assert part in text
        assert str(home / ".cache" / "h3-vortex" / "ComfyUI") in text

    def test_a_silent_network_is_given_up(self, home, tmp_path, monkeypatch):
        git_that(tmp_path, monkeypatch, "time.sleep(60)")
        run = subprocess.run
        monkeypatch.setattr(locate.subprocess, "run", lambda *a, **k: run(*a, **{**k, "timeout": 0.5}))
        with pytest.raises(locate.NotFound, match="did not answer within 15 s"):
            locate.clone_comfyui({}, say=lambda line: None)

    def test_git_is_never_asked_for_a_password(self, home, tmp_path, monkeypatch):
        git_that(tmp_path, monkeypatch, "sys.exit(0 if os.environ['GIT_TERMINAL_PROMPT'] == '0' and sys.stdin.read() == '' else 3)")
        with pytest.raises(locate.NotFound, match="is no ComfyUI folder"):  # git "succeeded" and left an empty folder
            locate.clone_comfyui({}, say=lambda line: None)

    def test_a_clone_goes_into_the_cache(self, home, tmp_path, monkeypatch):
        source = make_comfyui(tmp_path / "source")
        body = f"import shutil\nif 'clone' in sys.argv: shutil.copytree({str(source)!r}, sys.argv[-1], dirs_exist_ok=True)"
        git_that(tmp_path, monkeypatch, body)
        tree = locate.require_comfyui(None, {}, tmp_path, say=lambda line: None)
        assert tree.path == home / ".cache" / "h3-vortex" / "ComfyUI"
        assert [path.name for path in tree.path.parent.iterdir()] == ["ComfyUI"]

    def test_a_failed_clone_leaves_nothing(self, home, tmp_path, monkeypatch):
        git_that(tmp_path, monkeypatch, "sys.exit(1 if 'clone' in sys.argv else 0)")
        with pytest.raises(locate.NotFound, match="failed with code 1"):
            locate.clone_comfyui({}, say=lambda line: None)
        assert list((home / ".cache" / "h3-vortex").iterdir()) == []


def test_pythons_in_order(tmp_path):
    tree = locate.Tree(tmp_path / "p" / "ComfyUI", (0, 33, 0), "test")
    scripts, exe = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    wanted = [tree.path / "venv" / scripts / exe, tree.path / ".venv" / scripts / exe]
    wanted += [tmp_path / "p" / "python_embeded" / "python.exe"]
    for path in wanted:
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert locate.pythons_of(tree) == [*wanted, Path(sys.executable)]


def test_missing_modules():
    assert locate.missing_modules(sys.executable, ("json", "no_such_module_here")) == ["no_such_module_here"]
    assert locate.missing_modules("/no/such/python", ("json",)) == ["json"]


def test_a_python_with_torch_but_not_the_rest_is_named(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(locate, "missing_modules", lambda python: ["comfy_kitchen"])
    assert locate.python_for(locate.Tree(tmp_path, (0, 33, 0), "test"), said.append) is None
    assert "comfy_kitchen" in said[0]
    monkeypatch.setattr(locate, "missing_modules", lambda python: ["torch", "av"])
    assert locate.python_for(locate.Tree(tmp_path, (0, 33, 0), "test"), said.append) is None
    assert len(said) == 1

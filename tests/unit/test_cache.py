"""The disk cache: places, round trips, corruption, folders that cannot be written, several writers at once."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from h3_vortex.kernels import cache


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned_unwritable", set())
    return tmp_path / "cache"


@pytest.mark.parametrize("platform, environment, expected", [
    ("linux", {"H3_VORTEX_CACHE": "/x/y"}, Path("/x/y")),
    ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/h3-vortex")),
    ("linux", {"HOME": "/home/me"}, Path("/home/me/.cache/h3-vortex")),
    ("win32", {"LOCALAPPDATA": "/local", "XDG_CACHE_HOME": "/x"}, Path("/local/h3-vortex")),
])  # fmt: skip
def test_place(monkeypatch, platform, environment, expected):
    for name in ("H3_VORTEX_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache.cache_dir() == expected


def test_round_trip(folder):
    assert cache.read_bytes("nvrtc", "a") is None
    assert cache.write_bytes("nvrtc", "a", b"\0cubin\xff")
    assert cache.read_bytes("nvrtc", "a") == b"\0cubin\xff"
    assert os.listdir(folder / "nvrtc") == ["a"]  # no temporary file stays behind


def test_digest_depends_on_every_part_and_border():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""), (b"ab", "d"), ((13, 0),), ((13, 1),)]
    assert len({cache.digest(*p) for p in parts}) == len(parts)
    assert cache.digest("ab", "c") == cache.digest(b"ab", b"c")


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:20], lambda data: b"\0" * len(data),
    lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
])  # fmt: skip
def test_a_damaged_file_is_absent(folder, damage):
    cache.write_bytes("nvrtc", "a", b"0123456789" * 10)
    path = folder / "nvrtc" / "a"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read_bytes("nvrtc", "a") is None
    cache.write_bytes("nvrtc", "a", b"again")
    assert cache.read_bytes("nvrtc", "a") == b"again"


def test_a_folder_where_a_file_should_be(folder):
    (folder / "nvrtc" / "a").mkdir(parents=True)
    assert cache.read_bytes("nvrtc", "a") is None
    assert cache.write_bytes("nvrtc", "a", b"x") is False


def test_unwritable_is_said_once(folder, caplog):
    folder.write_text("a file where the folder should be")
    assert cache.write_bytes("nvrtc", "a", b"x") is False
    assert cache.write_bytes("nvrtc", "b", b"x") is False
    assert cache.read_bytes("nvrtc", "a") is None
    assert len(caplog.records) == 1 and "cannot be written" in caplog.records[0].getMessage()


def test_json_versions(folder):
    assert cache.write_json("verdicts", "v", 2, {"a": [1, None]})
    assert cache.read_json("verdicts", "v", 2) == {"a": [1, None]}
    assert cache.read_json("verdicts", "v", 3) is None
    for body in (b"not json", b"[]", b'{"version": 2}', b'{"version": 2, "data": []}'):
        cache.write_bytes("verdicts", "v", body)
        assert cache.read_json("verdicts", "v", 2) is None


def test_threads_and_readers_never_see_half_a_file():
    bodies = [bytes([i]) * 50_000 for i in range(8)]
    stop, wrong = threading.Event(), []

    def write(body):
        for _ in range(20):
            cache.write_bytes("nvrtc", "a", body)

    def read():
        while not stop.is_set():
            body = cache.read_bytes("nvrtc", "a")
            if body is not None and body not in bodies:
                wrong.append(len(body))

    cache.write_bytes("nvrtc", "a", bodies[0])
    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write, args=(b,)) for b in bodies]
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not wrong and cache.read_bytes("nvrtc", "a") in bodies


def test_processes_write_the_same_file(folder):
    root = Path(cache.__file__).resolve().parent
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('cache', {str(root / 'cache.py')!r})\n"
        "cache = importlib.util.module_from_spec(spec); spec.loader.exec_module(cache)\n"
        "for _ in range(50): assert cache.write_bytes('nvrtc', 'a', sys.argv[1].encode() * 20000)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, letter]) for letter in "abc"]
    assert [p.wait(60) for p in running] == [0, 0, 0]
    assert cache.read_bytes("nvrtc", "a") in [letter * 20000 for letter in (b"a", b"b", b"c")]
    assert os.listdir(folder / "nvrtc") == ["a"]

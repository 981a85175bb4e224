"""What a workflow, a file or a web page could abuse: paths, pickles, the status route, the folder that ``run.py queue`` writes to."""

import ast
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from h3_vortex.kernels.patch import report
from h3_vortex.tests.conftest import ROOT
from h3_vortex.tests.host.test_nodes_decode import Vae, kept, latent

FOLDERS = ("kernels", "h3", "nodes", "frontdoor")
PRODUCT = [*sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.py")), ROOT / "__init__.py", ROOT / "run.py"]


# -- code ------------------------------------------------------------------------------------------------------------------------------


def test_nothing_is_unpickled_evaluated_or_run_through_a_shell():
    """``torch.load`` only with ``weights_only=True``; no pickle, marshal, shelve, eval, exec, os.system, no ``shell=True``."""
    forbidden = re.compile(r"(pickle|marshal|shelve|dill|cloudpickle|joblib)\b|eval|exec|os\.(system|popen)|(np|numpy)\.load")
    checked = 0
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not [name for name in names if re.match(r"(pickle|marshal|shelve|dill|joblib)\b", name)], f"{path}:{node.lineno}"
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert keywords.get("shell", "False") == "False", f"{path}:{node.lineno}"
            assert not forbidden.fullmatch(called), f"{path}:{node.lineno} calls {called}"
            if called == "torch.load":
                checked += 1
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno}"
            if called.endswith("load_torch_file"):
                checked += 1
                assert keywords.get("safe_load") == "True", f"{path}:{node.lineno}"
    assert checked >= 2


# -- paths from workflows --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decode(comfy, monkeypatch, tmp_path):
    from h3_vortex.nodes import decode

    (tmp_path / "output").mkdir()
    monkeypatch.setattr(comfy.folder_paths, "output_directory", str(tmp_path / "output"))
    return decode


def saved(path):
    from h3_vortex.h3 import latent_file

    latent_file.save(path, *latent()["samples"].unbind())
    return path


def test_a_saved_latent_is_a_file_of_its_folder(decode, tmp_path):
    outside = saved(tmp_path / "outside.safetensors")
    inside = saved(tmp_path / "output" / decode.FOLDER / "inside.safetensors")
    (inside.parent / "sub").mkdir()
    below = saved(inside.parent / "sub" / "below.safetensors")
    names = ["../../outside.safetensors", str(outside), "sub/below.safetensors", str(below), "..", "", ".", "sub/../inside.safetensors",
             "..\\..\\outside.safetensors", "inside.safetensors\0", str(inside), 7, None, ["inside.safetensors"]]  # fmt: skip
    for name in names:
        with pytest.raises(ValueError, match="'saved_latent' .* is not a file of output/h3_vortex_latents"):
            decode.H3VortexDecode.execute(Vae(), Vae(audio=True), saved_latent=name)
    assert decode.H3VortexDecode.execute(Vae(), Vae(audio=True), saved_latent="inside.safetensors").result[0].shape[0] == 5
    assert outside.exists() and inside.exists() and below.exists()


def test_a_saved_latent_that_links_elsewhere_is_refused(decode, tmp_path):
    outside = saved(tmp_path / "outside.safetensors")
    folder = tmp_path / "output" / decode.FOLDER
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match="'link.safetensors' is not a file of output"):
        decode.H3VortexDecode.execute(Vae(), Vae(audio=True), saved_latent="link.safetensors")


def test_an_output_folder_that_is_itself_a_link_works(decode, comfy, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").symlink_to(tmp_path / "output", target_is_directory=True)
    monkeypatch.setattr(comfy.folder_paths, "output_directory", str(tmp_path / "elsewhere"))
    saved(tmp_path / "output" / decode.FOLDER / "a.safetensors")
    assert decode.H3VortexDecode.execute(Vae(), Vae(audio=True), saved_latent="a.safetensors").result[0].shape[0] == 5
    assert [path.name for path in kept(tmp_path / "output")] == ["a.safetensors"]


TRAVERSALS = ("../../../../../etc/passwd", "/etc/passwd", "..\\..\\secret.safetensors", "../vae/minimax_h3_audio_vae_thin.pt")


@pytest.mark.parametrize("name", TRAVERSALS)
def test_file_choices_are_refused_by_the_server_before_anything_runs(server, name):
    """Over HTTP, for every choice of a file on every node of the pack."""
    asked = {
        "H3VortexLoad": ["diffusion_model", "text_encoder", "video_vae", "audio_vae"], "H3VortexDecode": ["saved_latent"],
        "H3VortexTurboLora": ["lora", "adaln_source"]}  # fmt: skip
    info = server.object_info()
    for node, inputs in asked.items():
        for which in inputs:
            result = server.queue({"1": {"class_type": node, "inputs": {which: name}}, "2": {
                "class_type": "PreviewAny", "inputs": {"source": ["1", len(info[node]["output"]) - 1]}}}, timeout=60)  # fmt: skip
            assert not result.ok and not result.outputs, (node, which)
            assert any(
                e["type"] == "value_not_in_list" and e["extra_info"]["input_name"] == which for e in result.node_errors["1"]["errors"]
            )


@pytest.mark.parametrize("name", TRAVERSALS)
def test_file_choices_that_come_through_a_link_are_refused_by_the_nodes(comfy, name):
    """A link skips the server's check of the list."""
    from h3_vortex.nodes.load import H3VortexLoad, _inspect
    from h3_vortex.nodes.turbo import H3VortexTurboLora

    for slot in ("diffusion_model", "text_encoder", "video_vae", "audio_vae"):
        with pytest.raises((FileNotFoundError, ValueError)) as refused:
            _inspect(slot, name)
        assert "root:" not in str(refused.value)
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(comfy.models / "diffusion_models" / "minimax_h3_tiny_pruned_bf16.safetensors"))
    with pytest.raises((FileNotFoundError, ValueError)):
        H3VortexTurboLora.execute(model, name, 1.0, "4 steps, 12/3", 0, 0.0, 0.0, "none")
    assert H3VortexLoad.define_schema().node_id == "H3VortexLoad"


def test_every_choice_of_a_file_is_listed_here(server):
    """A new file input must be added to the tests above."""
    lists = {}
    for node, entry in server.object_info().items():
        if node.startswith("H3Vortex"):
            for group in entry["input"].values():
                for name, spec in group.items():
                    options = spec[1].get("options") if spec[0] == "COMBO" else spec[0] if isinstance(spec[0], list) else ()
                    if any(str(option).endswith((".safetensors", ".pt")) for option in options or ()):
                        lists.setdefault(node, []).append(name)
    assert lists.get("H3VortexLoad") == ["diffusion_model", "text_encoder", "video_vae", "audio_vae"]
    assert set(lists) <= {"H3VortexLoad", "H3VortexTurboLora", "H3VortexDecode"}
    assert set(lists.get("H3VortexTurboLora", ())) <= {"lora", "adaln_source"}


# -- the status route ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, left", [
    ("could not be run: OSError: /home/me/venv/lib/site-packages/sageattention/_qattn.so: undefined symbol", "_qattn.so: undefined symbol"),
    (r"ImportError: DLL load failed: C:\Users\me\AppData\Local\x.dll", "x.dll"),
    ("No such file or directory: '/tmp/a b/main.c'", "'main.c'"),
    (r"\\server\share\models\h3.safetensors is gone", "h3.safetensors is gone"),
    ("~/models/h3.safetensors", "h3.safetensors"), ("D:/models/h3.safetensors", "h3.safetensors"),
    ("video/sound shifts 12/3, 1/2 of [gate|up]", "video/sound shifts 12/3, 1/2 of [gate|up]"),
    ("needs float16 or bfloat16, got float32", "needs float16 or bfloat16, got float32"),
])  # fmt: skip
def test_texts_of_the_status_hold_no_folders(text, left):
    (told,) = report.without_paths({"a": [text]})["a"]
    assert told.endswith(left)
    assert not [word for word in ("/home", "Users", "/tmp", "share", "models", "site-packages") if word in told]


def test_a_reason_with_a_path_reaches_the_report_but_not_the_status(monkeypatch):
    session = report.Session("exact", "stock (exact)")
    session.step_aside("could not be run: OSError: /secret/place/lib.so")
    calls = report.Calls()
    calls.stock["gate", "triton: /secret/place/cc failed"] = 1
    session.finish_call(calls, 1)
    session.finish_run(0.1, True)
    assert "/secret/place" in json.dumps(session.report())
    told = json.dumps(report.status())
    assert "secret" not in told and "lib.so" in told and "cc failed" in told


ORIGINS = [
    ({"Origin": "http://example.com"}, 403), ({"Origin": "http://example.com", "Sec-Fetch-Site": "cross-site"}, 403),
    ({"Origin": "null"}, None), ({"Origin": "{url}"}, 200), ({}, 200), ({"Sec-Fetch-Site": "cross-site"}, 403)]  # fmt: skip


@pytest.mark.parametrize("headers, expected", ORIGINS)
def test_the_status_route_follows_comfyuis_origin_rules(server, headers, expected):
    """Whatever ComfyUI answers to a page of another origin on its own route, it answers on this one."""

    def code(route):
        given = {key: value.replace("{url}", server.url) for key, value in headers.items()}
        try:
            with urllib.request.urlopen(urllib.request.Request(server.url + route, headers=given), timeout=30) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    assert code("/h3_vortex/status") == code("/system_stats")
    assert expected is None or code("/h3_vortex/status") == expected


def test_the_status_route_only_reads(server):
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(server.url + "/h3_vortex/status", data=b"{}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code in (404, 405)


# -- run.py queue ----------------------------------------------------------------------------------------------------------------------


def test_queue_writes_into_its_folder_only(server, tmp_path):
    """A server that names its outputs by paths: what is fetched lands in the folder, under a plain name, and overwrites nothing."""
    import asyncio

    from h3_vortex.frontdoor import client

    (Path(server.base) / "output" / "evil.txt").write_text("x")
    (tmp_path / "victim").write_text("before")
    out = tmp_path / "out"
    out.mkdir()
    (out / "victim").symlink_to(tmp_path / "victim")

    async def fetch(name):
        async with client.Client(server.url) as real:
            get = real._session.get
            real._session.get = lambda url, params=None: get(url, params={"filename": "evil.txt", "type": "output"})
            return await real.download({"filename": name, "type": "output"}, out)

    for name in ("../victim", "../../victim", str(tmp_path / "victim"), "victim", "..\\victim", "C:victim", "sub/../../victim"):
        path = asyncio.run(fetch(name))
        assert path.parent == out and path.read_text() == "x" and not path.is_symlink()
    assert (tmp_path / "victim").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "victim"]


def test_a_download_that_breaks_off_leaves_no_file(tmp_path):
    import asyncio

    from h3_vortex.frontdoor import client

    class Reply:
        status = 200
        content = property(lambda self: self)

        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            return False

        async def iter_chunked(self, size):
            yield b"half"
            raise ConnectionError("gone")

    async def fetch():
        async with client.Client("http://127.0.0.1:1") as broken:
            broken._session.get = lambda url, params=None: Reply()
            await broken.download({"filename": "a.mp4"}, tmp_path)

    with pytest.raises(ConnectionError):
        asyncio.run(fetch())
    assert list(tmp_path.iterdir()) == []

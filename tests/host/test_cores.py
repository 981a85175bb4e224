"""Cores: the functions that are called or replaced, cores nobody knows, the compiler's allocation scopes, and every other tree at hand."""

import gc
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.conftest import ROOT
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock
from h3_vortex.tests.host.scopes import Scopes

EAGER = Features(allow_eager=True)
STEPS = 4


@pytest.fixture(scope="module")
def core(comfy):
    from h3_vortex.kernels.patch import core

    return core


@pytest.fixture(scope="module")
def model(comfy, tiny_models):
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_bf16"]))
    yield patcher
    comfy.model_management.unload_all_models()


@pytest.fixture
def fresh_core(core):
    """The core is probed anew, before and after."""
    core.probe.cache_clear()
    yield core
    core.probe.cache_clear()


# -- signatures ----------------------------------------------------------------------------------------------------------------------


def test_every_core_function_takes_what_it_is_given(core):
    problems = {path: core.signature_problem(path, *lists) for path, lists in core.SIGNATURES.items()}
    assert not any(problems.values()), problems


def test_signatures_list_every_core_function_that_is_called(core):
    """The runner's modules reach into ComfyUI through core.py; what they call there is in the table, or read from a module by name."""
    folder = ROOT / "kernels" / "patch"
    text = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in ("core", "runner", "checks", "comfyui"))
    called = set(re.findall(r"core\.(?:model|ops|management)\.(\w+)\(", text.replace("self.", "core.").replace("core.core.", "core.")))
    listed = {path.split(":")[1].split(".")[0] for path in core.SIGNATURES}
    elsewhere = {"optimized_attention", "rope_rotation_table", "get_torch_device"}  # called by position, as their callers in the core do
    assert {"_mod_gate", "_mod_scale_shift", "cast_bias_weight"} <= called
    assert called <= listed | elsewhere, called - listed


def test_patcher_methods(comfy):
    patcher = comfy.model_patcher.ModelPatcher
    for name, wanted in {
        "add_wrapper_with_key": ["self", "wrapper_type", "key", "wrapper"],
        "remove_wrappers_with_key": ["self", "wrapper_type", "key"],
        "set_attachments": ["self", "key", "attachment"],
        "get_attachment": ["self", "key"],
    }.items():
        assert list(inspect.signature(getattr(patcher, name)).parameters) == wanted, name
    assert inspect.signature(patcher.clone).parameters["self"]


def test_block_arguments_and_wrapper_call(core):
    """What the core hands to a replacement is what the runner knows, and its wrappers get the arguments that ours passes on."""
    module = core.probe().model
    body = inspect.getsource(module.MiniMaxH3Model._forward)
    (call,) = re.findall(r'blocks_replace\[\("double_block", i\)\]\(\s*(\{.*?\})', body, re.S)
    assert set(re.findall(r'"(\w+)":', call)) <= core.BLOCK_ARGUMENTS
    outer = inspect.getsource(module.MiniMaxH3Model.forward)
    assert ".execute(x, timestep, context, transformer_options, minimax_payload=minimax_payload" in outer


@pytest.mark.parametrize("path, change, told", [
    ("DiTBlock.forward", lambda self, x, t_emb, mod_segments, rope_freqs, guidance, transformer_options={}: None, "DiTBlock.forward takes"),
    ("Attention.forward", lambda self, x, rope_freqs=None: None, "Attention.forward takes"),
    ("_mod_gate", None, "_mod_gate is missing"),
])
def test_unknown_core_steps_aside_with_one_line(model, fresh_core, monkeypatch, caplog, path, change, told):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    expected = sample(model, conditioning())
    owner = fresh_core.resolve(f"{fresh_core.MODEL}:{path.rsplit('.', 1)[0]}") if "." in path else sys.modules[fresh_core.MODEL]
    name = path.split(".")[-1]
    with monkeypatch.context() as patch:
        patch.delattr(owner, name) if change is None else patch.setattr(owner, name, change)
        patched = accelerate(model, EAGER)
    lines = [r.message for r in caplog.records if r.name == "h3_vortex"]
    assert len(lines) == 1 and told in lines[0] and "\n" not in lines[0]
    assert report(patched)["stepped_aside"] == lines[0]
    assert same(sample(patched, conditioning()), expected)


def test_a_block_that_does_something_new_is_not_reproduced(model, fresh_core, monkeypatch, caplog):
    """No signature shows it: the first block of a kind is run both ways, and the model stays stock when the bytes differ."""
    from h3_vortex.kernels.patch import verification
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    module = sys.modules[fresh_core.MODEL]
    forward = module.MLP.forward

    def newer(self, x):
        return forward(self, x) * 1.5

    newer.__module__, newer.__qualname__ = module.__name__, "MLP.forward"
    monkeypatch.setattr(module.MLP, "forward", newer)
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification.cache, "read_json", lambda *_: None)
    monkeypatch.setattr(verification.cache, "write_json", lambda *_: True)
    expected = sample(model, conditioning())
    patched = accelerate(model, EAGER)
    assert same(sample(patched, conditioning()), expected)
    told = report(patched)
    assert "a whole block does not give stock's bytes" in told["stepped_aside"] and not told["ops"]
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1


# -- the compiler --------------------------------------------------------------------------------------------------------------------


def compiler(core, flag=True, pause=None, version=None, monkeypatch=None):
    if version is not None:
        monkeypatch.setattr(core, "aimdo_version", lambda: version)
    arguments = SimpleNamespace(disable_comfy_compiler=False) if flag else SimpleNamespace()
    return core.compiler_state(arguments, SimpleNamespace(pause_malloc_graph=pause) if pause else SimpleNamespace())


def test_when_the_compiler_is_paused_and_when_avoided(core, monkeypatch):
    pause = object()
    assert compiler(core, flag=False).opt_out is None
    assert "cannot be paused" in compiler(core).opt_out
    assert compiler(core, pause=pause, version=(0, 5, 3), monkeypatch=monkeypatch).pause is pause
    assert "0.5.2" in compiler(core, pause=pause, version=(0, 5, 2), monkeypatch=monkeypatch).opt_out
    assert compiler(core, pause=pause, version=(0, 6, 0), monkeypatch=monkeypatch).opt_out is None


def test_opting_out_holds_for_the_call_and_counts(core):
    arguments = SimpleNamespace(disable_comfy_compiler="as the user set it")
    with core.compiler_off(arguments):
        with core.compiler_off(arguments):
            assert arguments.disable_comfy_compiler is True
        assert arguments.disable_comfy_compiler is True
    assert arguments.disable_comfy_compiler == "as the user set it"
    with pytest.raises(RuntimeError), core.compiler_off(arguments):
        raise RuntimeError
    assert arguments.disable_comfy_compiler == "as the user set it"


def test_a_core_that_cannot_pause_runs_each_call_without_the_compiler(model, fresh_core, monkeypatch):
    import comfy.cli_args
    from h3_vortex.kernels.patch.comfyui import accelerate

    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
    monkeypatch.delattr(comfy.model_prefetch, "pause_malloc_graph", raising=False)
    seen = []
    module = sys.modules[fresh_core.MODEL]
    forward = module.MiniMaxH3Model.forward

    def watched(self, *args, **kwargs):
        seen.append(comfy.cli_args.args.disable_comfy_compiler)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(module.MiniMaxH3Model, "forward", watched)
    expected = sample(model, conditioning("all"))
    patched = accelerate(model, EAGER)
    assert same(sample(patched, conditioning("all")), expected)
    assert seen == [False] * STEPS + [True] * STEPS
    assert comfy.cli_args.args.disable_comfy_compiler is False


def test_pauses_of_two_threads_do_not_mix(fresh_core, comfy):
    core = fresh_core.probe()
    entered = []

    class Pause:
        def __enter__(self):
            entered.append(threading.get_ident())

        def __exit__(self, *_):
            return False

    core.compiler = SimpleNamespace(pause=Pause, opt_out=None)
    with core.pause(), core.pause():
        thread = threading.Thread(target=lambda: core.pause().__enter__())
        thread.start()
        thread.join()
    assert len(entered) == 2 and len(set(entered)) == 2


# -- attention of newer cores ----------------------------------------------------------------------------------------------------------


def test_preferred_attention_of_newer_cores(model, fresh_core, monkeypatch):
    """``attn.comfy_attention`` goes along where the core's own forward passes it, and only for layers that have one."""
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    module, seen = sys.modules[fresh_core.MODEL], []
    original = module.optimized_attention

    def newer(*args, preferred_attention=None, **kwargs):
        seen.append(preferred_attention)
        return original(*args, **kwargs)

    def attention_declared():
        pass

    expected = sample(model, conditioning())
    monkeypatch.setattr(module, "optimized_attention", newer)
    core = fresh_core.probe()
    core.prefers_attention = True
    attn = model.model.diffusion_model.blocks[0].attn
    if not hasattr(attn, "comfy_attention"):
        monkeypatch.setitem(attn._modules, "comfy_attention", torch.nn.Module())
    declared = attn.comfy_attention
    monkeypatch.setattr(declared, "function", attention_declared, raising=False)
    patched = accelerate(model, EAGER)
    assert same(sample(patched, conditioning(), steps=1), sample(model, conditioning(), steps=1))
    given = {id(entry) for entry in seen if entry is not None}
    present = {id(m.comfy_attention) for m in model.model.diffusion_model.modules() if hasattr(m, "comfy_attention")}
    assert id(declared) in given and given <= present
    assert report(patched)["attention"]["backend"] == "attention_declared"
    assert report(patched)["attention"]["chosen_by"] == "checkpoint"
    assert same(sample(patched, conditioning()), expected)


@pytest.mark.parametrize("clones", [True, False])
def test_v_is_copied_where_stock_copies_it(model, fresh_core, monkeypatch, clones):
    """On the CPU no backend is known to be indifferent, so v is a copy exactly where the core's own forward makes one."""
    from h3_vortex.kernels.patch.comfyui import accelerate

    module, contiguous = sys.modules[fresh_core.MODEL], []
    original = module.optimized_attention

    def watched(q, k, v, *args, **kwargs):
        contiguous.append(v.peek().transpose(1, 2).is_contiguous())
        return original(q, k, v, *args, **kwargs)

    sample(accelerate(model, EAGER), conditioning(), steps=1)
    core = fresh_core.probe()
    assert core.clones_v == (".clone()" in inspect.getsource(module.Attention.forward))
    core.clones_v = clones
    monkeypatch.setattr(module, "optimized_attention", watched)
    sample(accelerate(model, EAGER), conditioning(), steps=1)
    blocks = len(model.model.diffusion_model.blocks)
    assert contiguous[-blocks:] == [clones] * blocks


# -- allocation scopes -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scopes(fresh_core, monkeypatch):
    """The stand-in graph, with verdicts forgotten so that verification happens inside it."""
    from h3_vortex.kernels.patch import verification

    watch = Scopes()
    watch.install(monkeypatch)
    monkeypatch.setattr(fresh_core, "aimdo_version", lambda: (0, 5, 5))
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification.cache, "read_json", lambda *_: None)
    monkeypatch.setattr(verification.cache, "write_json", lambda *_: True)
    gc.collect()
    gc.freeze()  # what lives already is not looked at again, or every scope would cost seconds
    yield watch
    gc.unfreeze()


def in_scopes(model, scopes, patched, steps=STEPS, **keywords):
    expected = sample(model, conditioning("all"), steps=steps, **keywords)
    assert not scopes.faults, "stock itself breaks a rule: the stand-in is wrong"
    scopes.blocks = 0
    assert same(sample(patched, conditioning("all"), steps=steps, **keywords), expected)
    assert scopes.blocks == steps * len(model.model.diffusion_model.blocks)
    assert not scopes.faults, scopes.faults


def test_scopes_notice_what_they_must(model, scopes):
    """The stand-in fails a block that keeps a tensor, one that frees the stream, and one that returns a new stream."""
    kept = []

    def keeps(args, extra):
        kept.append(args["img"] * 2)
        return extra["original_block"](args)

    def replaces(args, extra):
        out = extra["original_block"](args)
        return {"img": out["img"] + 1}

    for patch, word in ((keeps, "still alive"), (replaces, "still alive")):
        scopes.faults.clear()
        foreign = model.clone()
        foreign.set_model_patch_replace(patch, "dit", "double_block", 0)
        sample(foreign, conditioning(), steps=1)
        assert any(word in fault for fault in scopes.faults), scopes.faults


def test_blocks_keep_the_rules(model, scopes):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    patched = accelerate(model, EAGER)
    in_scopes(model, scopes, patched)
    assert scopes.pauses > 0, "verification did not pause"
    assert fused(report(patched), "gate_norm_modulate") == STEPS * len(model.model.diffusion_model.blocks)
    pauses = scopes.pauses
    in_scopes(model, scopes, patched)
    assert scopes.pauses == pauses, "a second run verifies again"


@pytest.mark.parametrize("features", [
    {"norm": False}, {"gate": False}, {"rope": False}, {"swiglu": False}, {"norm": False, "gate": False, "rope": False, "swiglu": False}])
def test_stock_pieces_keep_the_rules(model, scopes, features):
    from h3_vortex.kernels.patch.comfyui import accelerate

    in_scopes(model, scopes, accelerate(model, Features(allow_eager=True, **features)), steps=1)


@pytest.mark.parametrize("buffer", [None, 3])
def test_row_map_without_a_layout_keeps_the_rules(model, scopes, monkeypatch, buffer):
    """The core passed no layout, or one of another length: the map is made in a pause and dropped by the wrapper."""
    from h3_vortex.kernels.patch import comfyui

    monkeypatch.setattr(comfyui, "_row_buffer", lambda *_: None if buffer is None else torch.empty(buffer, dtype=torch.int32))
    in_scopes(model, scopes, comfyui.accelerate(model, EAGER), steps=1)


@pytest.mark.parametrize("what", ["attention", "segments", "unknown"])
def test_chained_patches_keep_the_rules(model, scopes, what):
    from h3_vortex.kernels.patch.comfyui import accelerate

    foreign = model.clone()
    for index, block in enumerate(model.model.diffusion_model.blocks):
        def patch(args, extra, block=block):
            more = {
                "attention": {"attention": lambda h, rope_freqs, transformer_options: block.attn(h, rope_freqs, transformer_options)},
                "segments": {"mod_segments": list(args["mod_segments"])},
                "unknown": {"temperature": 1},
            }[what]
            out = extra["original_block"]({**args, **more})
            assert out["img"] is args["img"]
            return out

        foreign.set_model_patch_replace(patch, "dit", "double_block", index)
    in_scopes(model, scopes, accelerate(foreign, EAGER), steps=1)


def test_quantised_inputs_keep_the_rules(comfy, tiny_models, scopes):
    from h3_vortex.kernels.patch.comfyui import accelerate, report
    from h3_vortex.tests.host import w4a4

    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("the reference GEMM is for the CPU: set H3_HOST_DEVICE=cpu")
    w4a4.register()
    with torch.inference_mode():
        model = comfy.sd.load_diffusion_model(str(tiny_models["pruned_nvfp4"]))
    with w4a4.native(model.model.diffusion_model):
        patched = accelerate(model, EAGER)
        in_scopes(model, scopes, patched, steps=1)
    assert fused(report(patched), "swiglu_nvfp4") == len(model.model.diffusion_model.blocks)


@pytest.mark.parametrize("where", ["attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"])
def test_an_exception_leaves_nothing_behind(model, scopes, where):
    """A failing layer fails the run with its own error; with the error gone nothing of the block is left, and the next run is whole."""
    from h3_vortex.kernels.patch.comfyui import accelerate, report
    from h3_vortex.tests.host.scopes import alive

    patched = accelerate(model, EAGER)
    sample(patched, conditioning("all"), steps=1)
    before = set(alive())
    layer = model.model.diffusion_model.blocks[1].get_submodule(where)

    def fail(*_):
        raise RuntimeError("out of memory, for example")

    handle = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="for example"):
            sample(patched, conditioning("all"), steps=1)
    finally:
        handle.remove()
    gc.collect()
    assert not set(alive()) - before
    in_scopes(model, scopes, patched, steps=1)
    assert report(patched)["model_calls"] == 3


# -- masks -------------------------------------------------------------------------------------------------------------------------------


def test_partial_denoise_mask(model, core, monkeypatch):
    """Cores that honour masks give each token its own modulation row."""
    from h3_vortex.kernels.patch import runner
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    mask = torch.ones(1, 1, 2, 4, 4)
    mask[..., 2:] = 0.5
    expected = sample(model, conditioning("all"), mask=mask)
    patched, per_token, row_map = accelerate(model, EAGER), [], runner.segments.row_map

    def watched(runs, *args):
        per_token.append(any(isinstance(row, torch.Tensor) for _, _, row in runs))
        return row_map(runs, *args)

    monkeypatch.setattr(runner.segments, "row_map", watched)
    assert same(sample(patched, conditioning("all"), mask=mask), expected)
    assert fused(report(patched), "norm_modulate") == STEPS * len(model.model.diffusion_model.blocks)
    honours = "denoise_mask" in inspect.signature(core.probe().model.MiniMaxH3Model._forward).parameters
    assert any(per_token) == honours


def test_partial_denoise_mask_keeps_the_rules(model, scopes):
    from h3_vortex.kernels.patch.comfyui import accelerate

    mask = torch.ones(1, 1, 2, 4, 4)
    mask[..., 2:] = 0.5
    in_scopes(model, scopes, accelerate(model, EAGER), steps=1, mask=mask)


# -- other trees -------------------------------------------------------------------------------------------------------------------------


def other_trees():
    """ComfyUI folders beside the one under test: ``H3_OTHER_COMFYUI`` (separated by the path separator) and the cache's other trees."""
    from h3_vortex.frontdoor import locate

    named = [Path(p) for p in os.environ.get("H3_OTHER_COMFYUI", "").split(os.pathsep) if p]
    cached = sorted(locate.cache_folder().glob("ComfyUI*"))
    return [p for p in [*named, *cached] if (p / "comfy" / "ldm" / "minimax" / "model.py").is_file()]


def run_on(tree, tmp_path):
    """The tests of this file, of the foreign patches and of every storage form, on another ComfyUI, in a process of its own."""
    files = [str(ROOT / "tests" / "host" / f"test_{name}.py") for name in ("cores", "accelerate_foreign", "accelerate")]
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:warnings", *files]
    environment = {**os.environ, "COMFYUI_DIR": str(tree), "H3_CORES_CHILD": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"{tree.name}:\n{run.stdout[-6000:]}\n{run.stderr[-2000:]}"


only_once = pytest.mark.skipif(bool(os.environ.get("H3_CORES_CHILD")), reason="this is the run on another tree")


@pytest.mark.slow
@only_once
def test_every_other_tree(comfyui_tree, tmp_path):
    trees = [p for p in other_trees() if p.resolve() != Path(comfyui_tree.path).resolve()]
    if not trees:
        pytest.skip("no second ComfyUI: put one at ~/.cache/h3-vortex/ComfyUI-next, or name it in H3_OTHER_COMFYUI")
    for tree in trees:
        run_on(tree, tmp_path)


@pytest.mark.slow
@only_once
def test_a_tree_like_the_newest_cores(comfyui_tree, tmp_path):
    """``attention=``, ``layout``, a declared attention, no copy of v, the compiler's flag: as 0.35 to 0.38 have them."""
    from h3_vortex.tests.host import newer_tree

    run_on(newer_tree.build(comfyui_tree.path, tmp_path / "newer"), tmp_path)


def test_reports_are_json(model):
    from h3_vortex.kernels.patch.comfyui import accelerate, report

    patched = accelerate(model, EAGER)
    sample(patched, conditioning(), steps=1)
    told = json.loads(json.dumps(report(patched)))
    assert told["layers"] and stock(told, "attention_v_view") is not None

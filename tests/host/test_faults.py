"""Faults in the middle of a run, in this process: memory, kernels, cache. It goes on with stock or stops; the next one is untouched."""

import pytest
import torch
from h3_vortex.kernels import cache, dispatch
from h3_vortex.kernels.patch import ops, verification
from h3_vortex.kernels.patch.ops import Features
from h3_vortex.tests.host.sampling import conditioning, fused, same, sample, stock

EAGER = Features(allow_eager=True)
STEPS, BLOCKS = 3, 2
KINDS = conditioning("all")


@pytest.fixture(scope="module")
def model(comfy, tiny_models):
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_bf16"]))
    yield patcher
    comfy.model_management.unload_all_models()


@pytest.fixture(scope="module")
def api(comfy):
    from h3_vortex.kernels.patch import comfyui

    return comfyui


@pytest.fixture(scope="module")
def expected(model):
    return sample(model, KINDS, steps=STEPS)


@pytest.fixture(scope="module")
def one_step(model):
    return sample(model, KINDS, steps=1)


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """No verdict is known, in memory or on disk, as in the first process on a machine."""
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned_unwritable", set())

    def forget():
        monkeypatch.setattr(verification, "_verdicts", {})
        monkeypatch.setattr(verification, "_loaded", set())

    forget()
    return forget


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("step, place", [(0, "attn.qkv_proj"), (1, "mlp.fc2"), (2, "attn.qkv_proj")])
def test_out_of_memory_at_each_step(model, api, expected, step, place):
    """In the second block, between any two of the pack's ops: the error reaches ComfyUI as it is, and nothing of the run stays."""
    patched = api.accelerate(model, EAGER)
    calls = iter(range(STEPS))
    layer = model.model.diffusion_model.blocks[1].get_submodule(place)
    handle = layer.register_forward_pre_hook(lambda *_: out_of_memory() if next(calls) == step else None)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            sample(patched, KINDS, steps=STEPS)
    finally:
        handle.remove()
    assert api.report(patched)["model_calls"] == step + 1
    assert same(sample(patched, KINDS, steps=STEPS), expected)
    assert same(sample(model, KINDS, steps=STEPS), expected)


@pytest.mark.parametrize("op", ["norm_modulate", "gate_norm_modulate", "qk_norm_rope", "swiglu", "gate"])
def test_out_of_memory_inside_an_op(model, api, expected, monkeypatch, op):
    """After its verification, in mid-run: an op that finds no memory does not leave a half-written stream to a second try."""
    patched = api.accelerate(model, EAGER)
    sample(patched, KINDS, steps=1)
    run, calls = ops.run, []

    def failing(name, *args):
        calls.append(name)
        return out_of_memory() if name == op and calls.count(op) == BLOCKS + 1 else run(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "run", failing)
        with pytest.raises(torch.OutOfMemoryError):
            sample(patched, KINDS, steps=STEPS)
    assert same(sample(patched, KINDS, steps=STEPS), expected)


@pytest.mark.parametrize("what", ["op", "block"])
def test_a_verification_without_memory_leaves_stock_and_is_tried_again(model, api, one_step, monkeypatch, new_process, what):
    """Wrong bytes: ``test_a_wrong_op_is_caught_before_use`` and ``test_a_block_that_does_something_new_is_not_reproduced``."""
    patched = api.accelerate(model, EAGER)
    with monkeypatch.context() as patch:
        patch.setattr(api.checks, "block" if what == "block" else "compare", out_of_memory)
        assert same(sample(patched, KINDS, steps=1), one_step)
        told = api.report(patched)
        if what == "block":
            assert "the model runs unpatched: could not be run: OutOfMemoryError" in told["stepped_aside"]
        else:  # the whole-block check runs the same ops, so none of them may have run fused
            assert told["stepped_aside"] is None and not any(fused(told, op) for op in told["ops"])
            assert all(stock(told, op) for op in ("norm_modulate", "gate", "qk_norm_rope", "swiglu"))
    new_process()
    again = api.accelerate(model, EAGER)
    assert same(sample(again, KINDS, steps=1), one_step)
    assert fused(api.report(again), "gate_norm_modulate") == BLOCKS


def test_a_kernel_that_does_not_compile_leaves_stock(model, api, one_step, monkeypatch, new_process, caplog):
    """A backend whose plan fails, as NVRTC's does on a source it rejects: the op runs stock, says so once, and the others go on."""

    def reject(*args):
        raise dispatch.BackendUnavailable("NVRTC 13.0 for sm_90a: error: identifier is undefined")

    op = ops.operator("swiglu")
    limits = dispatch.Constraints(frozenset({"cpu"}))
    monkeypatch.setattr(op, "backends", {**op.backends, "cuda": dispatch.Backend(dispatch.Planned(reject), limits)})
    monkeypatch.setattr(op, "_choices", {})
    monkeypatch.setattr(op, "_failed_plans", {})
    patched = api.accelerate(model, Features())  # without the references: stock where no backend runs
    assert same(sample(patched, KINDS, steps=1), one_step)
    told = api.report(patched)
    assert told["stepped_aside"] is None and fused(told, "swiglu") == 0
    assert caplog.text.count("swiglu: backend cuda is not used: NVRTC 13.0") == 1


def test_a_cache_that_cannot_be_used(model, api, one_step, new_process, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    patched = api.accelerate(model, EAGER)
    assert same(sample(patched, KINDS, steps=1), one_step)
    assert fused(api.report(patched), "gate_norm_modulate") == BLOCKS
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("damage", ["foreign", "left by a killed process"])
def test_a_damaged_cache_is_made_anew(model, api, one_step, new_process, tmp_path, damage):
    """Every kind of damage to the file itself: ``test_fuzz_files.py``."""
    assert same(sample(api.accelerate(model, EAGER), KINDS, steps=1), one_step)
    (path,) = (tmp_path / "cache").glob("**/*.json")
    if damage == "foreign":
        cache.write_json(path.parent.name, path.name, verification.VERSION, dict.fromkeys(verification.summary(), "equal"))
    else:
        path.rename(f"{path}.xyz.part")
    new_process()
    patched = api.accelerate(model, EAGER)
    assert same(sample(patched, KINDS, steps=1), one_step)
    told = api.report(patched)
    assert fused(told, "gate_norm_modulate") == BLOCKS
    assert not any("remembered" in verdict["note"] for verdict in told["verification"].values())


# -- decoding --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["video", "sound"])
def test_out_of_memory_twice_while_decoding_keeps_the_latent(comfy, monkeypatch, tmp_path, where):
    """The first try and the second: the run stops, says where the latent is, and that latent decodes."""
    from h3_vortex.nodes.decode import H3VortexDecode
    from h3_vortex.tests.host.test_nodes_decode import Vae, kept, latent

    monkeypatch.setattr(comfy.folder_paths, "output_directory", str(tmp_path))
    oom = [comfy.model_management.OOM_EXCEPTION("no memory") for _ in range(2)]
    given = latent(seed=3)
    vae, audio_vae = Vae(failures=oom if where == "video" else ()), Vae(audio=True, failures=oom if where == "sound" else ())
    with pytest.raises(RuntimeError, match="OutOfMemoryError: no memory. The latent is safe in"):
        H3VortexDecode.execute(vae, audio_vae, given)
    (path,) = kept(tmp_path)
    images, sound, *_ = H3VortexDecode.execute(Vae(), Vae(audio=True), saved_latent=path.name).result
    fresh = H3VortexDecode.execute(Vae(), Vae(audio=True), given).result
    assert torch.equal(images, fresh[0]) and torch.equal(sound["waveform"], fresh[1]["waveform"])


def test_two_decodes_of_one_latent_keep_a_file_each(comfy, monkeypatch, tmp_path):
    """Two servers with one output folder: the first to finish must not remove what the second one still needs."""
    from h3_vortex.nodes import decode
    from h3_vortex.tests.host.test_nodes_decode import latent

    monkeypatch.setattr(comfy.folder_paths, "output_directory", str(tmp_path))
    monkeypatch.setattr(decode.time, "strftime", lambda form: "20261201-120000")
    video, audio = latent()["samples"].unbind()
    assert decode._keep(video, audio) != decode._keep(video, audio)

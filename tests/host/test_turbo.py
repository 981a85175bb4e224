"""The side path in a real ComfyUI: exactness, composition with H3 Accelerate and other LoRAs, undoing, presets, every file form."""

import logging
import weakref

import pytest
import torch
from h3_vortex.h3.tiny import FORMATS
from h3_vortex.tests.host import int8_on_cpu, lora, sampling, turbo_file, w4a4

STEPS = 2


@pytest.fixture(scope="module")
def load(comfy):
    """``load(format)``: a ModelPatcher of the tiny model, loaded as nodes load it."""

    def load(name):
        path = comfy.models / "diffusion_models" / f"minimax_h3_tiny_{name}.safetensors"
        with torch.inference_mode():
            return comfy.sd.load_diffusion_model(str(path))

    return load


def adapters_of(patcher, alpha=2, **more):
    from h3_vortex.h3 import turbo

    shapes = turbo_file.layers(patcher.model.diffusion_model)
    return turbo.read(turbo_file.comfy_tensors(shapes, alpha=alpha, **more)).adapters


def core_lora(patcher, layers=lora.LAYERS):
    """Tensors of the small LoRA that the tests of H3 Accelerate give to core."""
    blocks = patcher.model.diffusion_model.blocks
    return lora.tensors(len(blocks), {name: tuple(blocks[0].get_submodule(name).weight.shape) for name in layers})


def attach(patcher, adapters, strength=1.0):
    from h3_vortex.kernels.patch import side_path

    return side_path.attach(patcher, adapters, strength)


def accelerated(patcher):
    from h3_vortex.kernels.patch.comfyui import Features, accelerate

    return accelerate(patcher, Features(allow_eager=True))


def sample(patcher, **more):
    return sampling.sample(patcher, sampling.conditioning(), steps=STEPS, **more)


def untouched(diffusion_model):
    return all(not m._forward_hooks and not m._forward_pre_hooks and "forward" not in vars(m) for m in diffusion_model.modules())


# -- what it computes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "pruned_int8_convrot", "pruned_fp8_scaled"])
def test_every_layer_adds_its_branch_and_strength_zero_adds_nothing(load, name):
    patcher = load(name)
    adapters = adapters_of(patcher)
    model = patcher.model.diffusion_model
    base = sample(patcher)
    assert sampling.same(base, sample(attach(patcher, adapters, 0.0)))
    turbo = attach(patcher, adapters, 0.5)
    with_lora = sample(turbo)
    assert not sampling.same(base, with_lora)
    from h3_vortex.kernels.patch.eligibility import side_paths

    branches = {layer: side_paths(model.get_submodule(layer)) for layer in adapters}
    assert all(len(found) == 1 for found in branches.values())
    # a layer alone: what a hook behind the branch sees, less what the layer gives without it, is the dense delta
    with torch.inference_mode():
        for layer, adapter in adapters.items():
            linear = model.get_submodule(layer)
            x = torch.randn(7, adapter.shape[1], generator=torch.Generator("cpu").manual_seed(1))
            x = x.to(patcher.load_device, patcher.model.get_dtype_inference())
            dense = adapter.dense().to(x.device)
            delta = (linear(x) - linear.forward(x)).double()
            exact = 0.5 * x.double() @ dense.T
            # two roundings of a product and one of the sum, each of eps relative to what it rounds
            size = x.double().norm(dim=1, keepdim=True) * dense.norm() + linear(x).double().abs()
            limit = 4 * torch.finfo(x.dtype).eps * size
            assert bool(((delta - exact).abs() <= limit).all()), layer
    assert sampling.same(base, sample(patcher)) and untouched(model)


@pytest.mark.parametrize("name", ["int8_convrot", "pruned_nvfp4"])
def test_no_layer_is_passed_over_by_core(load, name):
    # core runs an INT8 fc2 without calling it: each branch must act once per layer and model call, here with every branch counted
    patcher = load(name)
    turbo = attach(patcher, adapters_of(patcher))
    added = []
    from h3_vortex.kernels.patch import side_path

    original = side_path.Branch.add
    try:
        side_path.Branch.add = lambda self, x, out: (added.append(id(self)), original(self, x, out))[1]
        sample(turbo)
    finally:
        side_path.Branch.add = original
    blocks, refiner = len(patcher.model.diffusion_model.blocks), len(patcher.model.diffusion_model.token_refiner.blocks)
    assert len(added) == 4 * blocks * STEPS + 4 * refiner  # the refiner runs once per sampling
    assert len(set(added)) == 4 * (blocks + refiner)


def test_core_bypass_loses_the_int8_layer_that_the_side_path_keeps(comfy, load):
    # why core's own mechanism is not used; if this starts to fail, core has changed and the module can be thinner
    patcher = load("int8_convrot")
    only_fc2 = core_lora(patcher, ("mlp.fc2",))
    base = sample(patcher)
    bypass = comfy.sd.load_bypass_lora_for_models(patcher, None, only_fc2, 1.0, 0.0)[0]
    assert sampling.same(base, sample(bypass))
    from h3_vortex.h3 import turbo

    assert not sampling.same(base, sample(attach(patcher, turbo.read(only_fc2).adapters)))


def test_nvfp4_gets_the_same_delta_as_bf16(load):
    # users had LoRAs without effect, or a quarter of it, on NVFP4 (ComfyUI 11670): the delta here does not know the weight's format
    deltas = {}
    for name in ("bf16", "nvfp4", "int8_convrot", "fp8_scaled"):
        patcher = load(name)
        adapters = adapters_of(patcher)
        turbo = attach(patcher, adapters)
        sample(turbo)
        layer = "blocks.0.mlp.fc1"
        linear = patcher.model.diffusion_model.get_submodule(layer)
        x = torch.randn(33, adapters[layer].shape[1], generator=torch.Generator("cpu").manual_seed(1)).to(patcher.load_device)
        with torch.inference_mode():
            deltas[name] = (linear(x) - linear.forward(x)).double()
        exact = x.double() @ adapters[layer].dense().to(x.device).T
        deltas[name] = float((deltas[name] - exact).norm() / exact.norm())
    assert all(error < 1e-6 for error in deltas.values()), deltas
    assert deltas["nvfp4"] <= 1.5 * deltas["bf16"], deltas


# -- with H3 Accelerate ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_lora_with_accelerate_is_lora_alone(load, name):
    from h3_vortex.kernels.patch.comfyui import report

    patcher = load(name)
    adapters = adapters_of(patcher)
    alone = sample(attach(patcher, adapters))
    after = accelerated(attach(patcher, adapters))
    assert sampling.same(alone, sample(after))
    assert sampling.same(alone, sample(attach(accelerated(patcher), adapters)))
    told = report(after)
    assert told["stepped_aside"] is None
    # core folds SwiGLU into an INT8 layer's quantiser, and that kernel of ours needs a GPU
    for op in ("norm_modulate", "gate_norm_modulate", "qk_norm_rope", "gate", *(() if "int8" in name else ("swiglu",))):
        assert sampling.fused(told, op) == STEPS * len(patcher.model.diffusion_model.blocks), op


@pytest.mark.parametrize("layers", [("mlp.fc2",), ("attn.qkv_proj", "mlp.fc1"), lora.LAYERS])
def test_quantised_inputs_go_beside_the_branch(comfy, load, layers):
    from h3_vortex.h3 import turbo
    from h3_vortex.kernels.patch.comfyui import report
    from h3_vortex.kernels.patch.runner import SIDE_PATH

    w4a4.register()
    patcher = load("pruned_nvfp4")
    adapters = turbo.read(core_lora(patcher, layers)).adapters
    with w4a4.native(patcher.model.diffusion_model) as count:
        assert count == 8
        alone = sample(attach(patcher, adapters))
        both = accelerated(attach(patcher, adapters))
        assert sampling.same(alone, sample(both))
    told = report(both)
    assert told["stepped_aside"] is None
    calls = STEPS * 2
    beside = len(set(layers) - {"attn.out_proj"})  # its input was never fused with what makes it
    assert sampling.stock(told, "quantised input (TensorCoreNVFP4Layout)").get(SIDE_PATH, 0) == calls * beside
    assert sampling.fused(told, "nvfp4_quantize") == calls * (1 + beside)
    assert sampling.fused(told, "swiglu_nvfp4") == (0 if "mlp.fc2" in layers else calls)
    assert sampling.fused(told, "norm_modulate_nvfp4") == (0 if "attn.qkv_proj" in layers else calls)
    assert sampling.fused(told, "gate_norm_modulate_nvfp4") == (0 if "mlp.fc1" in layers else calls)


def test_int8_pairs_go_beside_the_branch(comfy, tiny_models, monkeypatch):
    # the course of the runner with references in the place of kitchen's CUDA kernels; verdicts of an emulation are not kept
    from h3_vortex.h3 import turbo
    from h3_vortex.kernels.patch import ops, side_path, verification
    from h3_vortex.kernels.patch.comfyui import report
    from h3_vortex.kernels.patch.runner import SIDE_PATH

    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("a CPU test: set H3_HOST_DEVICE=cpu")
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())
    monkeypatch.setattr(verification.cache, "read_json", lambda *_: None)
    monkeypatch.setattr(verification.cache, "write_json", lambda *_: True)
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **kwargs: True)
    with torch.inference_mode():
        patcher = comfy.sd.load_diffusion_model(str(tiny_models["pruned_int8_convrot"]), model_options={"dtype": torch.bfloat16})
    assert patcher.model.get_dtype_inference() == torch.bfloat16
    adapters = turbo.read(core_lora(patcher)).adapters
    int8_on_cpu.install(monkeypatch)
    pairs, alive = [], []
    gemm, add = ops.int8_gemm, side_path.Branch.add

    def watched_gemm(pair, *args):
        pairs.append(weakref.ref(pair[0]))
        return gemm(pair, *args)

    def watched_add(branch, x, out):
        alive.extend(pair for pair in pairs if pair() is not None)
        return add(branch, x, out)

    monkeypatch.setattr(ops, "int8_gemm", watched_gemm)
    monkeypatch.setattr(side_path.Branch, "add", watched_add)
    try:
        turbo_patcher = attach(patcher, adapters)
        alone = sample(turbo_patcher)
        both = accelerated(turbo_patcher)
        assert sampling.same(alone, sample(both))
        assert not sampling.same(alone, sample(patcher))
    finally:
        int8_on_cpu.uninstall()
        comfy.model_management.unload_all_models()
    assert pairs and not alive, "a pair outlives its product: memory that stock does not take"
    told, calls = report(both), STEPS * 2
    assert told["stepped_aside"] is None
    assert sampling.stock(told, "quantised input (TensorWiseINT8Layout)") == {SIDE_PATH: 2 * calls}
    assert sampling.fused(told, "quantize_rotate_int8") == 3 * calls and sampling.fused(told, "swiglu_int8") == calls
    assert sampling.fused(told, "norm_modulate") == sampling.fused(told, "gate_norm_modulate") == sampling.fused(told, "swiglu") == calls


# -- with other LoRAs, and undone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "int8_convrot"])
def test_two_loras_and_core_loras_stack(comfy, load, name):
    patcher = load(name)
    first, second = adapters_of(patcher, seed=3), adapters_of(patcher, seed=4)
    model = patcher.model.diffusion_model
    base = sample(patcher)
    one = sample(attach(patcher, first))
    two_patcher = attach(attach(patcher, first), second, -0.5)
    two = sample(two_patcher)
    assert len({tuple(v[0].flatten()[:4].tolist()) for v in (base, one, two)}) == 3
    assert sampling.same(two, sample(accelerated(two_patcher)))
    bypass = comfy.sd.load_bypass_lora_for_models(patcher, None, core_lora(patcher), 1.0, 0.0)[0]
    assert not sampling.same(sample(bypass), sample(attach(bypass, first)))
    assert sampling.same(one, sample(attach(patcher, first)))
    plain = lora.add(patcher)
    beside = sample(attach(plain, first))
    assert not sampling.same(beside, sample(plain)) and not sampling.same(beside, one)
    # off again, in whatever order they were taken off
    assert sampling.same(base, sample(patcher))
    assert not any(m._forward_hooks for m in model.modules())


def test_other_packs_forward_on_the_mlp_stays_and_comes_back(load):
    patcher = load("int8_convrot")
    adapters = adapters_of(patcher)
    expected = sample(attach(patcher, adapters))
    mlp = patcher.model.diffusion_model.blocks[0].mlp
    stock, calls = type(mlp).forward, []

    def theirs(x):
        calls.append(x.shape)
        return stock(mlp, x)

    other = patcher.clone()
    other.add_object_patch("diffusion_model.blocks.0.mlp.forward", theirs)
    assert sampling.same(expected, sample(attach(other, adapters)))
    assert len(calls) == STEPS
    assert sampling.same(expected, sample(accelerated(attach(other, adapters))))
    sample(patcher)
    assert vars(mlp).get("forward", None) is None or vars(mlp)["forward"].__func__ is stock


def test_an_already_quantised_input_from_elsewhere_is_refused(load):
    patcher = load("nvfp4")
    turbo = attach(patcher, adapters_of(patcher))
    sample(turbo)
    linear = patcher.model.diffusion_model.blocks[0].mlp.fc1
    from comfy.quant_ops import QuantizedTensor

    with torch.inference_mode(), pytest.raises(RuntimeError, match="already quantised"):
        linear(QuantizedTensor.from_float(torch.randn(16, 256), "TensorCoreNVFP4Layout"))


def test_weights_are_a_model_of_their_own_and_go_with_it(comfy, load):
    from h3_vortex.kernels.patch import side_path

    patcher = load("bf16")
    turbo = attach(patcher, adapters_of(patcher))
    (weights,) = turbo.get_additional_models_with_key(side_path.KEY)
    count = sum(a.down.numel() + a.up.numel() for a in adapters_of(patcher).values())
    assert weights.model_size() == 4 * count
    sample(turbo)
    assert any(loaded.model.is_clone(weights) for loaded in comfy.model_management.current_loaded_models)
    comfy.model_management.unload_all_models()
    assert untouched(patcher.model.diffusion_model)
    assert sampling.same(sample(turbo), sample(attach(patcher, adapters_of(patcher))))


def test_a_lora_hangs_whole_or_not_at_all(load):
    patcher = load("int8_convrot")
    adapters = adapters_of(patcher)
    turbo = attach(patcher, {**adapters, "blocks.99.mlp.fc2": next(iter(adapters.values()))})
    for _ in range(2):
        with pytest.raises(AttributeError):
            sample(turbo)
        assert untouched(patcher.model.diffusion_model)
    assert sampling.same(sample(attach(patcher, adapters)), sample(attach(patcher, adapters)))


def test_a_clone_s_end_does_not_take_the_lora_off(load):
    # clones copy core's "is injected" flag, and a patcher detaches when it is deleted
    patcher = load("bf16")
    turbo = attach(patcher, adapters_of(patcher))
    expected = sample(turbo)
    unused = turbo.clone()
    assert unused.is_injected
    del unused
    model = patcher.model.diffusion_model
    assert not untouched(model)
    assert sampling.same(expected, sample(turbo)) and sampling.same(expected, sample(turbo.clone()))
    del turbo
    sample(patcher)
    assert untouched(model)


@pytest.mark.parametrize("accelerate", [lambda patcher: patcher, accelerated], ids=["alone", "accelerated"])
def test_a_clone_for_another_gpu_has_weights_of_its_own(load, accelerate):
    """What core's multi-GPU nodes do with a model and with everything that hangs on it."""
    from h3_vortex.kernels.patch import side_path

    first = load("bf16")
    patched = accelerate(attach(attach(first, adapters_of(first), 0.7), adapters_of(first, seed=9), 0.5))
    expected = sample(patched)
    other = patched.deepclone_multigpu(new_load_device=patched.load_device)
    assert other.model is not first.model
    assert sampling.same(sample(other), expected) and sampling.same(sample(patched), expected)
    models = [[holder.model for holder in p.get_additional_models_with_key(side_path.KEY)] for p in (patched, other)]
    assert len(models[0]) == len(models[1]) == 2 and not {*map(id, models[0])} & {*map(id, models[1])}
    other.inject_model()
    branches = [b for m in other.model.diffusion_model.modules() for b in m._forward_hooks.values()]
    owned = {id(m) for weights in models[1] for m in weights.modules()}
    assert branches and all(id(branch.pair) in owned for branch in branches)
    other.eject_model()


def test_streamed_weights_give_the_same_bytes(load, monkeypatch):
    patcher = load("bf16")
    turbo = attach(patcher, adapters_of(patcher))
    whole = sample(turbo)
    lora.keep_weights_out(monkeypatch)
    patcher = load("bf16")
    assert sampling.same(whole, sample(attach(patcher, adapters_of(patcher))))


# -- the node ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lora_file(comfy, load):
    """``lora_file(name, tensors, metadata)`` puts a file into models/loras."""
    from safetensors.torch import save_file

    folder = comfy.models / "loras"
    folder.mkdir(exist_ok=True)
    made = []

    def write(name, tensors, metadata=None):
        made.append(folder / name)
        save_file({k: v.contiguous() for k, v in tensors.items()}, made[-1], metadata)
        comfy.folder_paths.filename_list_cache.clear()
        return name

    yield write
    for path in made:
        path.unlink()


def node(model, name, **more):
    from h3_vortex.nodes.turbo import AUTO, NONE, H3VortexTurboLora

    given = {"strength": 1.0, "preset": AUTO, "steps": 0, "shift_video": 0.0, "shift_audio": 0.0, "adaln_source": NONE} | more
    with torch.inference_mode():
        return H3VortexTurboLora.execute(model, name, **given).result


def run(model, sigmas, sampler, seed=7):
    from comfy_extras.nodes_custom_sampler import BasicGuider, RandomNoise, SamplerCustomAdvanced
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    with torch.inference_mode():
        (latent,) = EmptyMiniMaxH3LatentAV.execute(64, 64, 5).result
        (guider,) = BasicGuider.execute(model, sampling.conditioning()).result
        (noise,) = RandomNoise.execute(seed).result
        out = SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, latent).result[0]
    return [stream.clone() for stream in out["samples"].unbind()]


def test_the_node_reads_every_form_and_sets_what_the_file_wants(load, lora_file):
    patcher = load("pruned_int8_convrot")
    shapes = turbo_file.layers(patcher.model.diffusion_model)
    comfy_form = lora_file("minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors", turbo_file.comfy_tensors(shapes, alpha=0.25))
    diffusers = lora_file("minimax_h3_fl2v_turbo_4step_v1.0_768p_bf16.safetensors", turbo_file.diffusers_tensors(shapes), {"alpha": "0.25"})
    results = []
    for name in (comfy_form, diffusers):
        model, sigmas, sampler, info = node(patcher, name)
        assert "12 modules, rank " in info and "scale 0.0625" in info and "4 steps, shifts 6/3, turbo_euler" in info
        assert [round(v, 4) for v in sigmas.tolist()] == [1, 0.9474, 0.8571, 0.6667, 0]
        assert model.model_options["transformer_options"]["minimax_h3_sigma_shift_video"] == 6
        assert "warning" not in info
        results.append(run(model, sigmas, sampler))
    assert sampling.same(*results)
    model, sigmas, sampler, info = node(patcher, comfy_form, strength=0.0)
    assert "(off)" in info
    from comfy_extras.nodes_minimax_h3 import MiniMaxH3SigmaShift

    plain = MiniMaxH3SigmaShift.execute(patcher, 6.0, 3.0).result[0]
    assert sampling.same(run(plain, sigmas, sampler), run(model, sigmas, sampler))
    assert not sampling.same(results[0], run(model, sigmas, sampler))


def test_unknown_files_partial_files_and_wrong_files(load, lora_file, caplog):
    patcher = load("bf16")
    shapes = turbo_file.layers(patcher.model.diffusion_model)
    tensors = turbo_file.comfy_tensors(shapes)
    extra = tensors | {
        "diffusion_model.blocks.49.mlp.fc1.lora_A.weight": torch.zeros(2, 256),
        "diffusion_model.blocks.49.mlp.fc1.lora_B.weight": torch.zeros(1024, 2), "something.else": torch.zeros(1)}
    name = lora_file("mine.safetensors", extra)
    *_, info = node(patcher, name)
    assert "12 of 13 modules applied; not in this model: blocks.49.mlp.fc1; keys of nothing: something.else" in info
    assert "unknown file: 8 steps because its name states none" in info and "alpha = rank was assumed" in info
    wrong = lora_file("flux.safetensors", {"transformer.single_blocks.0.lora_A.weight": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match="flux.safetensors: the file has no key of a MiniMax H3 LoRA"):
        node(patcher, wrong)
    large = lora_file("large.safetensors", {
        "blocks.0.mlp.fc1.lora_A.weight": torch.zeros(2, 5376), "blocks.0.mlp.fc1.lora_B.weight": torch.zeros(28672, 2)})
    with pytest.raises(ValueError, match=r"none of the file's 1 modules fits this model .*LoRA \[28672, 5376\], model \[1024, 256\]"):
        node(patcher, large)
    model, sigmas, sampler, info = node(patcher, name, preset="4 steps, 12/3", steps=20)
    assert "warning: 20 steps with a Turbo LoRA made for 4" in info
    with caplog.at_level(logging.WARNING):
        run(model, sigmas, sampler)
    assert "20 steps with a Turbo LoRA made for 4" in caplog.text


def test_adaln_pairs_on_a_pruned_model(comfy, load, lora_file):
    # the tiny pruned table belongs to no time embedder; one that does is made here: a full checkpoint whose curve lies in the table's span
    from h3_vortex.h3 import adaln, tiny
    from safetensors.torch import load_file, save_file

    full_path = comfy.models / "diffusion_models" / "minimax_h3_tiny_bf16.safetensors"
    full = load_file(full_path)
    curve = adaln.time_curve(full.__getitem__, list(full), tiny.CURVE_GRID)
    _, _, basis = torch.linalg.svd(curve, full_matrices=False)
    own = load_file(comfy.models / "diffusion_models" / "minimax_h3_tiny_pruned_bf16.safetensors")
    own["adaln_t_table"] = (curve @ basis[: tiny.CURVE_DIM].T).float().contiguous()
    path = comfy.models / "diffusion_models" / "minimax_h3_tiny_pruned_from_full.safetensors"
    save_file(own, path)
    try:
        with torch.inference_mode():
            patcher = comfy.sd.load_diffusion_model(str(path))
        generator = torch.Generator("cpu").manual_seed(5)
        tensors = {}
        for layer in ("blocks.0.adaln_proj.linear", "blocks.1.adaln_proj.linear", "final_layer.adaln_proj.linear"):
            rows = patcher.model.diffusion_model.get_submodule(layer).weight.shape[0]
            tensors[f"{layer}.lora_A.weight"] = torch.randn(2, tiny.TIME_DIM, generator=generator) * 0.1
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=generator) * 0.1
        name = lora_file("adaln.safetensors", tensors)
        base, *_ = node(patcher, name, strength=0.0)
        model, sigmas, sampler, info = node(patcher, name)
        assert "3 AdaLN pairs left out" in info and "adaln_source" in info
        model, sigmas, sampler, info = node(patcher, name, adaln_source=full_path.name)
        assert "3 AdaLN pairs expressed in the model's time curve: residual at most" in info and "left out" not in info
        assert not sampling.same(run(model, sigmas, sampler), run(base, sigmas, sampler))
        with pytest.raises(ValueError, match="the pruned model was made from another checkpoint"):
            node(load("pruned_bf16"), name, adaln_source=full_path.name)
        with pytest.raises(ValueError, match="has no time_embedder.proj_in.weight"):
            node(patcher, name, adaln_source="minimax_h3_tiny_pruned_bf16.safetensors")
    finally:
        path.unlink()

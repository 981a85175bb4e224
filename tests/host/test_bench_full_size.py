"""The full-size benchmarks at a tiny size: ComfyUI's own model, loader, patcher and sampler under them, and gates that hold."""

import json
import logging

import pytest
import torch
from h3_vortex.benchmarks import _comfy, block, candidates, full_size, harness, shapes, step, trajectory, turbo

DEVICE = torch.device("cpu")
TINY, JOB = shapes.MODELS["tiny"], shapes.job("64x96x22")


@pytest.fixture(scope="module")
def core(comfy):
    """ComfyUI as the benchmarks import it; the ``comfy`` fixture imported it into this process first."""
    loaded = _comfy.load(DEVICE, str(comfy.dir))
    with torch.inference_mode():
        yield loaded


@pytest.fixture(scope="module", params=full_size.WEIGHTS)
def patcher(core, request):
    return full_size.build(core, TINY, request.param, DEVICE)


def flipping(times, bit=0):
    """A candidate whose wrapper flips one bit of one video value in the model calls numbered in ``times``."""

    def make(patcher, options):
        calls = []

        def wrapper(executor, *args, **kwargs):
            out = executor(*args, **kwargs)
            calls.append(1)
            if len(calls) - 1 in times:
                out[0].view(torch.int32).view(-1)[5] ^= 1 << bit
            return out

        clone = patcher.clone()
        clone.add_wrapper_with_key("diffusion_model", "test", wrapper)
        return clone

    return make


@pytest.fixture
def candidate(monkeypatch):
    """Puts a stand-in in the place of the pack's own candidate."""

    def use(make):
        monkeypatch.setitem(candidates.CANDIDATES, "exact", make)
        monkeypatch.delitem(candidates.REPORTS, "exact")

    return use


def test_the_model_is_comfyuis_own(core, patcher):
    model = patcher.model
    assert type(model).__module__ == "comfy.model_base" and type(model).__name__ == "MiniMaxH3"
    assert type(patcher) is core.model_patcher.ModelPatcher
    dit = model.diffusion_model
    assert type(dit) is core.minimax.MiniMaxH3Model and len(dit.blocks) == TINY.blocks
    assert dit.use_adaln_curves and dit.blocks[0].adaln_proj.linear.in_features == TINY.curve[1]
    weight = dit.blocks[1].mlp.fc2.weight
    layout = getattr(weight, "_layout_cls", None)
    if layout == "TensorCoreNVFP4Layout":
        assert weight._qdata.dtype == torch.uint8 and tuple(weight.shape) == (TINY.hidden, TINY.ffn)
    elif layout:
        assert layout == "TensorWiseINT8Layout"
        assert weight._params.convrot and weight._params.convrot_groupsize == full_size.CONVROT_GROUP
    else:
        # On a CPU ComfyUI turns BF16 weights into FP32 as it loads them.
        assert type(weight) is torch.nn.Parameter and weight.dtype == model.get_dtype_inference()


@pytest.mark.parametrize("weights, stored, beside", [
    ("int8", torch.int8, {"weight_scale", "comfy_quant"}), ("nvfp4", torch.uint8, {"weight_scale", "weight_scale_2", "comfy_quant"}),
], ids=["int8", "nvfp4"])  # fmt: skip
def test_models_of_one_seed_hold_the_same_values(core, weights, stored, beside):
    plain, packed = (full_size.state_dict(core, TINY, name, DEVICE, seed=3) for name in ("bf16", weights))
    packed_names = {name for name in packed if name not in plain}
    assert {name.rsplit(".", 1)[1] for name in packed_names} == beside
    assert len(packed_names) == len(beside) * 4 * TINY.blocks
    for name, tensor in plain.items():
        if packed[name].dtype == stored:
            assert f"{name}_scale" in packed_names
        else:
            assert torch.equal(tensor, packed[name]), name
    other = full_size.state_dict(core, TINY, "bf16", DEVICE, seed=4)
    assert not torch.equal(plain["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(plain["blocks.0.mlp.fc1.weight"], plain["blocks.1.mlp.fc1.weight"])


@pytest.mark.parametrize("frames", [5, 22, 39, 124, 362])
def test_jobs_are_on_comfyuis_grid(comfy, frames):
    from comfy_extras.nodes_minimax_h3 import temporal_shape

    job = shapes.Job("test", 1344, 768, frames)
    assert temporal_shape(frames) == (frames, job.latent[0], job.audio)


def test_a_wrapper_on_a_clone_runs_on_the_clone_alone(core, patcher):
    inputs = full_size.make_inputs(core, patcher, JOB, DEVICE)
    stock = full_size.run_step(core, patcher, inputs)
    assert [tuple(tensor.shape) for tensor in stock] == [(1, 24, *JOB.latent), (1, 32, 2, JOB.audio)]
    assert all(torch.isfinite(tensor).all() and tensor.std() > 0 for tensor in stock)
    flipped = full_size.run_step(core, flipping({0})(patcher, {}), inputs)
    assert [harness.differing(a, b) for a, b in zip(stock, flipped, strict=True)] == [1, 0]
    assert harness.sha256(full_size.run_step(core, patcher, inputs)) == harness.sha256(stock)


def test_block_replacements_of_a_patcher_apply(core, patcher):
    inputs = full_size.make_inputs(core, patcher, JOB, DEVICE)
    watch = trajectory.Watch(patcher, (0, 2))
    watched = full_size.run_step(core, watch.patcher, inputs)
    assert harness.sha256(watched) == harness.sha256(full_size.run_step(core, patcher, inputs))
    assert {index: tuple(kept.shape) for index, kept in watch.kept.items()} == {
        0: (JOB.rows, TINY.hidden),
        2: (JOB.rows, TINY.hidden),
    }
    assert not torch.equal(watch.kept[0], watch.kept[2])


def test_trajectory_is_comfyuis_sampler(core, patcher):
    seen = []

    def wrapper(executor, x, timestep, *args, **kwargs):
        seen.append(float(timestep[0]))
        return executor(x, timestep, *args, **kwargs)

    clone = patcher.clone()
    clone.add_wrapper_with_key("diffusion_model", "test", wrapper)
    predictions = []
    latents = full_size.run_trajectory(core, clone, JOB, 3, on_step=lambda index, pair: predictions.append((index, len(pair))))
    assert predictions == [(0, 2), (1, 2), (2, 2)]
    sigmas = core.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", 3)
    assert seen == pytest.approx([1000 * float(sigma) for sigma in sigmas[:-1]], rel=1e-6)
    again = full_size.run_trajectory(core, patcher, JOB, 3)
    assert harness.sha256(latents) == harness.sha256(again)
    assert harness.sha256(latents) != harness.sha256(full_size.run_trajectory(core, patcher, JOB, 3, seed=2))


def test_attention_that_cannot_run_says_why(core):
    assert full_size.attention_missing(core, "fa2", DEVICE) is None
    for name in ("cudnn", "kitchen", "sage"):
        assert full_size.attention_missing(core, name, DEVICE) == "needs a CUDA device"
    with pytest.raises(ValueError, match="unknown attention 'magic'"):
        full_size.attention_missing(core, "magic", DEVICE)


def test_error_log_keeps_each_message_once():
    with _comfy.ErrorLog() as errors:
        for _ in range(3):
            logging.error("Error running sage attention: %s", "no kernel")
        logging.warning("fine")
    assert errors.messages == ["Error running sage attention: no kernel"]
    logging.error("after")
    assert len(errors.messages) == 1


def run(tool, tmp_path, *argv):
    """(exit code, result) of a benchmark at tiny size."""
    out = tmp_path / "result.json"
    code = tool.main(["--model", "tiny", "--device", "cpu", "--out", str(out), *argv])
    result = json.loads(out.read_text())
    harness.validate(result)
    return code, result


def test_step_measures_the_packs_own_candidate(core, tmp_path):
    eager = 'features={"allow_eager": true}'
    code, result = run(step, tmp_path, "--shape", "tiny,64x96x22", "--weights", "bf16,int8,nvfp4", "--attention", "fa2,cudnn",
                       "--reps", "2", "--option", eager)  # fmt: skip
    assert code == 0
    measured = [row for row in result["rows"] if row["candidate"]]
    assert [(row["weights"], row["shape"], row["candidate"]) for row in measured] == [
        (weights, shape, name)
        for weights in full_size.WEIGHTS for shape in ("64x96x22", "tiny") for name in ("stock", "exact")
    ]  # fmt: skip
    assert all(row["equal_to_stock"] and row["repeatable"] and row["finite"] for row in measured)
    assert all(row["ms"]["n"] == 2 for row in measured)
    fused = [row["dispatch"]["fused"] for row in measured if row["candidate"] == "exact"]
    assert min(fused) > 0, "stock against stock is no evidence"
    skipped = [row for row in result["rows"] if "skipped" in row]
    assert len(skipped) == 6 and all("CUDA" in row["skipped"] for row in skipped)


def test_step_fails_on_one_bit(core, candidate, tmp_path, capsys):
    candidate(flipping({2}))  # the first call and the first round agree, the second round does not
    code, result = run(step, tmp_path, "--shape", "tiny", "--reps", "2")
    ours = result["rows"][1]
    assert code == 1 and ours["equal_to_stock"] is False and ours["repeatable"] is False
    assert "BYTES DIFFER FROM STOCK: bf16 tiny fa2 exact" in capsys.readouterr().out


def test_step_skips_what_would_miss_the_deadline(core, candidate, tmp_path):
    candidate(lambda patcher, options: patcher.clone())
    code, result = run(step, tmp_path, "--shape", "tiny", "--deadline", "0.001")
    assert code == 1 and "deadline" in result["rows"][0]["skipped"]


def test_a_model_that_does_not_fit_is_a_row_with_the_way_out(core, candidate, tmp_path, monkeypatch, capsys):
    candidate(lambda patcher, options: patcher.clone())
    genuine = full_size.build

    def build(comfy, model, weights, *rest):
        if weights == "bf16":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return genuine(comfy, model, weights, *rest)

    monkeypatch.setattr(full_size, "build", build)
    code, result = run(step, tmp_path, "--shape", "tiny", "--reps", "1", "--weights", "bf16,int8")
    assert code == 0 and "--weights int8" in result["rows"][0]["skipped"]
    assert [row["candidate"] for row in result["rows"]] == [None, "stock", "exact"]
    code, result = run(step, tmp_path, "--shape", "tiny", "--reps", "1")
    assert code == 1 and len(result["rows"]) == 1 and "NOTHING WAS MEASURED" in capsys.readouterr().out


def test_a_row_of_ones_own_is_one_command(core, candidate, tmp_path, monkeypatch, capsys):
    candidate(lambda patcher, options: patcher.clone())
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert step.main(["--model", "tiny", "--shape", "tiny", "--device", "cpu", "--reps", "1"]) == 0
    (file,) = tmp_path.glob("step-cpu-*.json")
    assert str(file) in capsys.readouterr().out
    result = json.loads(file.read_text())
    harness.validate(result)
    assert result["environment"]["comfyui"] == core.version and len(result["environment"]["source_sha256"]) == 64


@pytest.mark.parametrize("weights", full_size.WEIGHTS)
def test_gates_pass_the_packs_own_candidate(core, tmp_path, weights):
    code, result = run(trajectory, tmp_path, "--weights", weights, "--shape", "64x96x22", "--small-shape", "tiny", "--steps", "3",
                       "--option", 'features={"allow_eager": true}')  # fmt: skip
    rows = {row["gate"]: row for row in result["rows"]}
    assert code == 0 and all(row["passed"] for row in rows.values())
    assert list(rows) == list(trajectory.GATES)
    assert {gate: row["dispatch"]["fused"] > 0 for gate, row in rows.items()} == dict.fromkeys(trajectory.GATES, True)
    assert list(rows["linear"]["detail"]) == [f"{block} {name}" for block in range(3) for name in ("qkv", "out_proj", "fc1", "fc2")]
    assert rows["linear"]["detail"]["0 fc1"]["of"] == shapes.job("tiny").rows * 2 * TINY.ffn
    assert list(rows["blocks"]["detail"]) == ["0", "1", "2"]
    assert rows["full"]["detail"] == {"first_differing_step": None}, "a CPU has no speed-up"
    assert len(rows["full"]["ours"]["prediction_sha256"]) == 3
    assert rows["full"]["dispatch"]["fused"] > rows["short"]["dispatch"]["fused"] > 0


def test_gates_refuse_to_go_on(core, candidate, tmp_path):
    # Calls: 0 is the first gate's, 1 and 2 are the two steps of the second. The lowest bit would not survive the sampler.
    candidate(flipping({2}, bit=22))
    code, result = run(trajectory, tmp_path, "--shape", "64x96x22", "--small-shape", "tiny", "--steps", "3",
                       "--gates", "bytes,short,full")  # fmt: skip
    rows = {row["gate"]: row for row in result["rows"]}
    assert code == 1
    assert {gate: row["passed"] for gate, row in rows.items()} == {"bytes": True, "short": False, "full": None}
    assert rows["short"]["detail"]["first_differing_step"] == 1
    assert rows["full"]["detail"] == {"waits_for": "short"}


def test_the_linear_gate_sees_the_products_of_either_storage(core, patcher):
    inputs = full_size.make_inputs(core, patcher, JOB, DEVICE)
    with trajectory.products(core, TINY, JOB.rows) as stock:
        full_size.run_step(core, patcher, inputs)
    ours = candidates.make("exact", patcher, {"features": {"allow_eager": True}})
    with trajectory.products(core, TINY, JOB.rows) as fused:
        full_size.run_step(core, ours, inputs)
    assert len(stock) == 12 and list(stock) == list(fused)
    assert not any(harness.differing(stock[key], fused[key]) for key in stock)
    assert not torch.equal(stock[0, "fc2"], stock[1, "fc2"])
    with pytest.raises(RuntimeError, match="saw .* products of 3 blocks"), trajectory.products(core, TINY, JOB.rows + 1):
        full_size.run_step(core, patcher, inputs)


def test_the_linear_gate_fails_on_one_wrong_product(core, candidate, tmp_path, monkeypatch):
    candidate(lambda patcher, options: patcher.clone())
    genuine, calls = torch.nn.functional.linear, []

    def wrong(x, weight, *rest):
        out = genuine(x, weight, *rest)
        if tuple(weight.shape) == TINY.gemms()["fc1"] and out.shape[0] == shapes.job("tiny").rows:
            calls.append(1)
            if len(calls) == TINY.blocks + 2:  # block 1 of the second step
                out.view(torch.int32)[3, 5] ^= 1
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    code, result = run(trajectory, tmp_path, "--shape", "tiny", "--small-shape", "tiny", "--gates", "linear,blocks")
    rows = {row["gate"]: row for row in result["rows"]}
    assert code == 1 and rows["linear"]["passed"] is False and rows["blocks"]["passed"] is None
    assert {key for key, entry in rows["linear"]["detail"].items() if entry["differing"]} >= {"1 fc1"}
    assert rows["linear"]["detail"]["1 fc1"]["differing"] == 1 and rows["linear"]["detail"]["0 fc2"]["differing"] == 0


def test_block_sorts_the_work_of_one_block(core, candidate, tmp_path):
    candidate(lambda patcher, options: patcher.clone())
    code, result = run(block, tmp_path, "--shape", "64x96x22", "--rounds", "1", "--weights", ",".join(full_size.WEIGHTS))
    assert code == 0
    assert [(row["weights"], row["candidate"]) for row in result["rows"]] == [
        (weights, name) for weights in full_size.WEIGHTS for name in ("stock", "exact")]  # fmt: skip
    for row in result["rows"]:
        groups = row["groups_ms"]
        assert {"qkv GEMM", "out_proj GEMM", "fc1 GEMM", "fc2 GEMM", "rope", "norm", "modulation", "gate", "activation",
                "adaln", "copies"} <= set(groups)  # fmt: skip
        launches = {(kernel["group"], kernel["name"]): kernel["launches"] for kernel in row["kernels"]}
        assert launches["gate", "aten::addcmul_"] == 6  # two gates, three segments
        assert launches["norm", "aten::rms_norm"] == 2


def test_block_fails_when_nothing_was_measured(core, tmp_path, capsys):
    code, result = run(block, tmp_path, "--shape", "tiny", "--attention", "cudnn")
    assert code == 1 and [row["skipped"] for row in result["rows"]] == ["needs a CUDA device"]
    assert "NOTHING WAS MEASURED" in capsys.readouterr().out


def test_block_fails_when_nothing_was_fused_on_a_gpu(core, candidate, tmp_path, monkeypatch, capsys):
    candidate(lambda patcher, options: patcher.clone())
    monkeypatch.setattr(candidates, "idle", lambda rows, device: rows[1:])  # what it finds has a unit test; a CPU fuses nothing
    code, _ = run(block, tmp_path, "--shape", "tiny", "--rounds", "1")
    assert code == 1 and "NOTHING WAS FUSED: bf16 fa2 exact" in capsys.readouterr().out


def test_turbo_measures_every_storage(core, tmp_path, capsys):
    code, result = run(turbo, tmp_path, "--shape", "tiny", "--reps", "1", "--weights", ",".join(full_size.WEIGHTS),
                       "--option", 'features={"allow_eager": true}')  # fmt: skip
    rows = {(row["weights"], row["candidate"]): row for row in result["rows"]}
    assert code == 0 and len(rows) == len(result["rows"]) == 4 * len(full_size.WEIGHTS)
    for weights in full_size.WEIGHTS:
        stock, exact, lora, both = (rows[weights, name] for name in ("stock", "exact", "turbo", "turbo+exact"))
        assert stock["sha256"] == exact["sha256"] != lora["sha256"] == both["sha256"]
        assert exact["dispatch"]["fused"] > 0 and both["dispatch"]["fused"] > 0, "the options reach both"
        assert both["overhead"]["over"] == "exact" and stock["attention_function"] == full_size.attention_name(core, "fa2", DEVICE)
    out = capsys.readouterr().out
    assert "no speeds" in out and " over stock" not in out


@pytest.mark.parametrize("tool", [turbo, trajectory])
def test_one_attention_that_cannot_run_is_told_before_the_build(core, tmp_path, tool):
    with pytest.raises(SystemExit, match="--attention kitchen: needs a CUDA device"):
        run(tool, tmp_path, "--shape", "tiny", "--attention", "kitchen")
    assert not list(tmp_path.iterdir())

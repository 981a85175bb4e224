"""Through a real server: four-step runs of every storage form, stock and patched, equal to the last byte; report and status route."""

import json
import shutil
from pathlib import Path

import pytest
from h3_vortex.frontdoor.server import PACK_FOLDER, prepare_base
from h3_vortex.h3.tiny import FORMATS
from h3_vortex.tests.host.sampling import fused, fused_forms, stock

HERE = Path(__file__).resolve().parent
TEST_NODES = "h3_test_nodes"
STEPS, BLOCKS = 4, 2


@pytest.fixture(scope="module")
def base(tiny_models, tmp_path_factory):
    """A base directory with this pack, the test nodes and the tiny models, and a LoRA for them."""
    import safetensors.torch
    from h3_vortex.h3 import tiny
    from h3_vortex.tests.host import lora

    base = prepare_base(tmp_path_factory.mktemp("accelerate-base"))
    nodes = base / "custom_nodes" / TEST_NODES
    nodes.mkdir()
    shutil.copy(HERE / "server_nodes" / "__init__.py", nodes)
    for name in ("sampling.py", "w4a4.py"):
        shutil.copy(HERE / name, nodes)
    models = base / "models" / "diffusion_models"
    models.mkdir(exist_ok=True)
    for name in FORMATS:
        shutil.copy(tiny_models[name], models)
    (base / "models" / "loras").mkdir(exist_ok=True)
    widths = {"attn.qkv_proj": (3 * tiny.HEADS * tiny.HEAD_DIM, tiny.HIDDEN), "attn.out_proj": (tiny.HIDDEN, tiny.HEADS * tiny.HEAD_DIM),
              "mlp.fc1": (2 * tiny.FFN, tiny.HIDDEN), "mlp.fc2": (tiny.HIDDEN, tiny.FFN)}
    safetensors.torch.save_file(lora.tensors(tiny.LAYERS, widths), base / "models" / "loras" / "random.safetensors")
    return base


@pytest.fixture(scope="module")
def fresh(start_server, base):
    """Starts a server of its own."""
    return lambda: start_server("--whitelist-custom-nodes", PACK_FOLDER, TEST_NODES, base=base)


@pytest.fixture(scope="module")
def running(fresh):
    with fresh() as server:
        yield server


def graph(name, kinds="all", accelerate=None, lora=False, w4a4=False):
    """API graph of a four-step run that ends in its result as text."""
    model = ["loader", 0]
    nodes = {"loader": ("UNETLoader", {"unet_name": f"minimax_h3_tiny_{name}.safetensors", "weight_dtype": "default"})}
    if lora:
        nodes["lora"] = ("LoraLoaderModelOnly", {"model": model, "lora_name": "random.safetensors", "strength_model": 1.0})
        model = ["lora", 0]
    if w4a4:
        nodes["w4a4"], model = ("H3TestW4A4", {"model": model}), ["w4a4", 0]
    if accelerate:
        settings = {} if accelerate == "H3TestEager" else {"mode": "exact", "attention": "stock (exact)"}
        nodes["accelerate"], model = (accelerate, {"model": model, **settings}), ["accelerate", 0]
    nodes |= {
        "positive": ("H3TestConditioning", {"kinds": kinds}),
        "latent": ("EmptyMiniMaxH3LatentAV", {"width": 64, "height": 64, "length": 5}),
        "guider": ("BasicGuider", {"model": model, "conditioning": ["positive", 0]}),
        "sigmas": ("BasicScheduler", {"model": model, "scheduler": "simple", "steps": STEPS, "denoise": 1.0}),
        "noise": ("RandomNoise", {"noise_seed": 7}),
        "sampler": ("KSamplerSelect", {"sampler_name": "euler"}),
        "sample": ("SamplerCustomAdvanced", {
            "noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["sampler", 0], "sigmas": ["sigmas", 0],
            "latent_image": ["latent", 0]}),
        "result": ("H3TestResult", {"latent": ["sample", 0], "model": model}),
    }
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def run(server, *args, **kwargs):
    result = server.queue(graph(*args, **kwargs))
    assert result.ok, result.message()
    return json.loads(result.outputs["result"]["text"][0])


def warm_up(server):
    """H3 Warmup as the last node of a graph of its own."""
    nodes = graph("pruned_int8_convrot", accelerate="H3TestEager")
    keep = {key: nodes[key] for key in ("loader", "accelerate", "positive", "latent")}
    inputs = {"model": ["accelerate", 0], "positive": ["positive", 0], "latent": ["latent", 0]}
    result = server.queue({**keep, "warmup": {"class_type": "H3VortexWarmup", "inputs": inputs}})
    assert result.ok, result.message()
    told = json.loads(result.outputs["warmup"]["text"][0])
    assert told["model_calls"] == 1 and fused_forms(told, "gate_norm_modulate") == BLOCKS


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_patched_is_stock(running, name, lora):
    expected = run(running, name, lora=lora)
    assert expected["report"] is None and all(0 < std < 100 for std in expected["std"])
    # Between the two, so that both start from freshly loaded weights: under dynamic VRAM core's first use of an NVFP4 weight with a LoRA
    # multiplies with the patched floating-point weight, later ones with the re-quantised copy it kept. Stock against stock differs as well.
    assert run(running, name, lora=not lora)["sha256"] != expected["sha256"], "the LoRA does nothing"
    patched = run(running, name, lora=lora, accelerate="H3TestEager")
    assert patched["sha256"] == expected["sha256"]
    told = patched["report"]
    assert told["model_calls"] == STEPS and told["stepped_aside"] is None
    for op in ("norm_modulate", "gate_norm_modulate", "gate", "qk_norm_rope"):
        assert fused_forms(told, op) == STEPS * BLOCKS


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "pruned_nvfp4"])
def test_w4a4_patched_is_stock(running, name, lora):
    if not running.cpu:
        pytest.skip("the reference GEMM is for the CPU: set H3_HOST_DEVICE=cpu")
    expected = run(running, name, lora=lora, w4a4=True)
    patched = run(running, name, lora=lora, w4a4=True, accelerate="H3TestEager")
    assert patched["sha256"] == expected["sha256"]
    for op in ("norm_modulate_nvfp4", "gate_norm_modulate_nvfp4", "nvfp4_quantize", "swiglu_nvfp4"):
        assert fused(patched["report"], op) == STEPS * BLOCKS
    assert not stock(patched["report"], "quantised input (TensorCoreNVFP4Layout)")


def test_a_fresh_process_gives_the_same_bytes(running, fresh):
    """The process that ran everything above, patched and plain in turn, against one that warms up and runs the patched model first."""
    with fresh() as server:
        _, before = server.get("/h3_vortex/status")
        assert before["ready"] is False and before["runs"] == 0 and before["models"] == []
        warm_up(server)
        _, warm = server.get("/h3_vortex/status")
        assert warm["ready"] is True and warm["warm"] is True and warm["runs"] == 1 and warm["last_run"]["model_calls"] == 1
        first = run(server, "pruned_int8_convrot", accelerate="H3TestEager")["sha256"]
        assert run(server, "pruned_int8_convrot")["sha256"] == first
    assert run(running, "pruned_int8_convrot", accelerate="H3TestEager")["sha256"] == first
    assert run(running, "pruned_int8_convrot")["sha256"] == first


def test_node_and_status_route(running):
    """H3 Accelerate as a user has it. On a CPU it runs stock and says so; the run shows in the log and in the status."""
    expected = run(running, "pruned_bf16")
    told = run(running, "pruned_bf16", accelerate="H3VortexAccelerate")
    assert told["sha256"] == expected["sha256"]
    status, body = running.get("/h3_vortex/status")
    assert status == 200 and body["ready"] is True and body["runs"] >= 1
    assert set(body) >= {"pack", "ready", "warm", "runs", "last_run", "models", "verification"}
    assert body["last_run"]["complete"] is True
    if running.cpu:
        assert "no accelerated kernel for cpu" in told["report"]["stepped_aside"]
        assert body["last_run"]["stepped_aside"] == told["report"]["stepped_aside"]
    assert "H3 Vortex: complete run" in running.log
    text = json.dumps(body)
    assert str(running.base) not in text and ".safetensors" not in text and "custom_nodes" not in text


def test_status_route_is_behind_the_origin_check(running):
    """ComfyUI refuses a cross-site request to its own routes; this one is among them."""
    import urllib.error
    import urllib.request

    for route in ("/system_stats", "/h3_vortex/status"):
        request = urllib.request.Request(running.url + route, headers={"Origin": "http://example.com", "Sec-Fetch-Site": "cross-site"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 403, route

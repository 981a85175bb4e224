"""Turbo LoRAs through a real server: 4 and 8 steps on every storage form, with and without the kernels, saved and run again."""

import json
import shutil
from pathlib import Path

import pytest
from h3_vortex.frontdoor.server import PACK_FOLDER, prepare_base
from h3_vortex.h3.tiny import FORMATS
from h3_vortex.tests.host import turbo_file

HERE = Path(__file__).resolve().parent
TEST_NODES = "h3_test_nodes"


@pytest.fixture(scope="module")
def base(tiny_models, tmp_path_factory):
    """A base directory with this pack, the test nodes, the tiny models and two tiny Turbo files."""
    base = prepare_base(tmp_path_factory.mktemp("turbo-base"))
    nodes = base / "custom_nodes" / TEST_NODES
    nodes.mkdir()
    shutil.copy(HERE / "server_nodes" / "__init__.py", nodes)
    for name in ("sampling.py", "w4a4.py"):
        shutil.copy(HERE / name, nodes)
    models = base / "models" / "diffusion_models"
    models.mkdir(exist_ok=True)
    for name in FORMATS:
        shutil.copy(tiny_models[name], models)
    turbo_file.write(base / "models")
    return base


@pytest.fixture(scope="module")
def fresh(start_server, base):
    return lambda: start_server("--whitelist-custom-nodes", PACK_FOLDER, TEST_NODES, base=base)


@pytest.fixture(scope="module")
def running(fresh):
    with fresh() as server:
        yield server


def graph(name, lora, strength=1.0, accelerate=False, lora_node=True):
    model = ["turbo", 0]
    nodes = {
        "loader": ("UNETLoader", {"unet_name": f"minimax_h3_tiny_{name}.safetensors", "weight_dtype": "default"}),
        "turbo": ("H3VortexTurboLora", {
            "model": ["loader", 0], "lora": lora, "strength": strength, "preset": "auto (from the file)", "steps": 0, "shift_video": 0.0,
            "shift_audio": 0.0, "adaln_source": "none"}),
    }  # fmt: skip
    if not lora_node:  # the same sampler, sigmas and shifts on a model that never met the node
        shifts = (6.0, 3.0) if "768p" in lora else (12.0, 3.0)
        nodes["shift"] = ("MiniMaxH3SigmaShift", {"model": ["loader", 0], "shift_video": shifts[0], "shift_audio": shifts[1]})
        model = ["shift", 0]
    if accelerate:
        nodes["accelerate"], model = ("H3TestEager", {"model": model}), ["accelerate", 0]
    nodes |= {
        "positive": ("H3TestConditioning", {"kinds": "all"}),
        "latent": ("EmptyMiniMaxH3LatentAV", {"width": 64, "height": 64, "length": 5}),
        "denoise": ("H3VortexDenoise", {
            "model": model, "positive": ["positive", 0], "latent": ["latent", 0], "sampler": ["turbo", 2], "sigmas": ["turbo", 1],
            "seed": 7}),
        "result": ("H3TestResult", {"latent": ["denoise", 0], "model": model}),
    }  # fmt: skip
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def run(server, nodes):
    result = server.queue(nodes)
    assert result.ok, result.message()
    return json.loads(result.outputs["result"]["text"][0]), result


SETTINGS = {
    4: (turbo_file.FOUR, "1, 0.9474, 0.8571, 0.6667, 0", "6/3"),
    8: (turbo_file.EIGHT, "1, 0.9882, 0.9730, 0.9524, 0.9231, 0.8780, 0.8000, 0.6316, 0", "12/3"),
}
CASES = [(name, 4) for name in FORMATS] + [("pruned_int8_convrot", 8), ("pruned_nvfp4", 8)]


@pytest.mark.parametrize("name, steps", CASES)
def test_turbo_steps_on_every_storage(running, name, steps):
    lora, sigmas, shifts = SETTINGS[steps]
    alone, result = run(running, graph(name, lora))
    assert all(0 < std < 100 for std in alone["std"])
    (info,) = result.outputs["turbo"]["text"]
    assert f"{steps} steps, shifts {shifts}, turbo_euler" in info and f"sigmas: {sigmas}" in info and "warning" not in info
    assert "12 modules, rank 4" in info and "known file name" in info
    record = json.loads(result.outputs["denoise"]["text"][0])
    assert record["steps"] == steps
    both, _ = run(running, graph(name, lora, accelerate=True))
    assert both["sha256"] == alone["sha256"] and both["report"]["stepped_aside"] is None


@pytest.mark.parametrize("name", ["pruned_int8_convrot", "pruned_nvfp4"])
def test_strength_zero_is_no_lora(running, name):
    lora = turbo_file.FOUR
    alone, _ = run(running, graph(name, lora))
    off, _ = run(running, graph(name, lora, strength=0.0))
    without, _ = run(running, graph(name, lora, lora_node=False))
    assert off["sha256"] == without["sha256"] != alone["sha256"]


def test_a_saved_workflow_gives_the_same_bytes_in_a_new_process(running, fresh, tmp_path):
    nodes = graph("pruned_int8_convrot", turbo_file.EIGHT, accelerate=True)
    first, result = run(running, nodes)
    _, history = running.get(f"/history/{result.prompt_id}")
    saved = tmp_path / "workflow.json"
    saved.write_text(json.dumps(history[result.prompt_id]["prompt"][2]), encoding="utf-8")
    with fresh() as server:
        again, _ = run(server, json.loads(saved.read_text(encoding="utf-8")))
    assert again["sha256"] == first["sha256"]


def test_a_base_schedule_with_a_turbo_file_is_flagged(running):
    nodes = graph("pruned_bf16", turbo_file.FOUR)
    inputs = {"model": ["turbo", 0], "scheduler": "simple", "steps": 20, "denoise": 1.0}
    nodes["schedule"] = {"class_type": "BasicScheduler", "inputs": inputs}
    nodes["denoise"]["inputs"]["sigmas"] = ["schedule", 0]
    run(running, nodes)
    assert "20 steps with a Turbo LoRA made for 4" in running.log

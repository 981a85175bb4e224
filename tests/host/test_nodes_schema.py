"""What a user sees of the nodes: tooltips everywhere, and a help page that names every input and output."""

import re

import pytest
from h3_vortex.tests.conftest import ROOT

NODES = {
    "H3VortexLoad": "H3 Load",
    "H3VortexConditioning": "H3 Conditioning",
    "H3VortexDenoise": "H3 Packed Denoiser",
    "H3VortexDecode": "H3 Decode",
    "H3VortexTurboLora": "H3 Turbo LoRA",
    "H3VortexSampler": "H3 Sampler",
}


@pytest.fixture(scope="module")
def listed(server):
    return {name: node for name, node in server.object_info().items() if name.startswith("H3Vortex")}


def test_the_server_lists_them(listed):
    assert {name: listed[name]["display_name"] for name in NODES} == NODES
    assert {node["category"] for node in listed.values()} == {"H3 Vortex"}


def test_every_input_and_output_has_a_tooltip(listed):
    for name, node in listed.items():
        assert node["description"], name
        for section in ("required", "optional"):
            for given, (_, options, *_) in ((k, [*v, {}]) for k, v in node["input"].get(section, {}).items()):
                assert options.get("tooltip"), f"{name}: input {given}"
        tips = node["output_tooltips"]
        assert tips and all(tips) and len(tips) == len(node["output"]), name


@pytest.mark.parametrize("name", NODES)
def test_help_page_names_every_input_and_output(listed, name):
    page = (ROOT / "web" / "docs" / name / "en.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODES[name]}\n")
    inputs, outputs = page.split("## Outputs")
    node = listed[name]
    given = [*node["input"]["required"], *node["input"].get("optional", {})]
    assert re.findall(r"^\| `(\w+)` \|", inputs, re.MULTILINE) == given
    assert re.findall(r"^\| `(\w+)` \|", outputs, re.MULTILINE) == node["output_name"]
    assert "## Example" in page and "## Limits" in page


@pytest.mark.parametrize("name", NODES)
def test_help_page_is_served(server, name):
    status, page = server.get(f"/extensions/ComfyUI-H3-Vortex/docs/{name}/en.md")
    assert status == 200 and NODES[name] in page

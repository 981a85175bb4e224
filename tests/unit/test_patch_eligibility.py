"""Which layer is fed what, from its live state; which module is another pack's."""

import types
from types import SimpleNamespace

import pytest
import torch
from h3_vortex.kernels.patch import eligibility
from h3_vortex.kernels.patch.eligibility import INT8, NVFP4, foreign, kind, linear_input, norm_problem, origin

HOME = __name__


class Linear(torch.nn.Module):
    """The state that ComfyUI's mixed-precision Linear carries."""

    def __init__(self, layout=NVFP4, width=512, **changes):
        super().__init__()
        params = SimpleNamespace(convrot=True, convrot_groupsize=256, transposed=False)
        state = {"_full_precision_mm": False, "weight_function": [], "bias_function": [], "bias": None,
                 "weight": SimpleNamespace(_params=params, dtype=torch.bfloat16, shape=(64, width))}
        if layout is not None:
            state["layout_type"] = layout
        for name, value in {**state, **changes}.items():
            object.__setattr__(self, name, value)

    def forward(self, x):
        return x


class Norm(torch.nn.Module):
    def __init__(self, width=512, dtype=torch.bfloat16, casts=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)
        self.eps, self.comfy_cast_weights, self.weight_function, self.bias_function = 1e-5, casts, [], []

    def forward(self, x):
        return x


def x(rows=8, width=512, device="cpu", grad=False):
    return torch.zeros(rows, width, dtype=torch.bfloat16, device=device, requires_grad=grad)


def on_cuda(rows=8, width=512, dtype=torch.bfloat16):
    return SimpleNamespace(shape=(rows, width), device=torch.device("cuda"), dtype=dtype, requires_grad=False)


def test_plain_layers_need_no_explanation():
    for layout in (None, "TensorCoreFP8E4M3Layout", "TensorCoreMXFP8Layout"):
        assert linear_input(Linear(layout), x(), HOME) == eligibility.Input()


def test_nvfp4_layer_takes_quantised_input():
    assert linear_input(Linear(), x(), HOME) == eligibility.Input("nvfp4", NVFP4)


@pytest.mark.parametrize("change, word", [
    ({"_full_precision_mm": True}, "full precision"),
    ({"comfy_force_cast_weights": True}, "compute dtype is forced"),
    ({"weight_function": [lambda w: w]}, "LoRA"),
    ({"bias_function": [lambda b: b]}, "LoRA"),
    ({"pre_quant_scale": torch.ones(512)}, "pre_quant_scale"),
    ({"weight": torch.zeros(64, 512)}, "not stored quantised"),
])
@pytest.mark.parametrize("layout, data", [(NVFP4, x()), (INT8, on_cuda())])
def test_state_that_turns_the_fast_input_off(layout, data, change, word):
    takes = linear_input(Linear(layout, **change), data, HOME)
    assert takes.form == "plain" and takes.layout == layout and word in takes.reason


def test_gradients_turn_it_off():
    assert "gradients" in linear_input(Linear(), x(grad=True), HOME).reason


def test_input_scale_of_several_values():
    assert "holds 4 values" in linear_input(Linear(input_scale=torch.ones(4)), x(), HOME).reason
    assert linear_input(Linear(input_scale=torch.ones(())), x(), HOME).form == "nvfp4"


def test_int8_layer_on_cuda():
    assert linear_input(Linear(INT8), on_cuda(), HOME) == eligibility.Input("int8", INT8)


@pytest.mark.parametrize("layer, data, word", [
    (Linear(INT8), x(), "CUDA only"),
    (Linear(INT8), on_cuda(rows=2), "2 rows of 512"),
    (Linear(INT8, width=384), on_cuda(width=384), "rows of 384"),
    (Linear(INT8, width=32768), on_cuda(width=32768), "rows of 32768"),
    (Linear(INT8), on_cuda(dtype=torch.float16), "activations are float16"),
    (Linear(INT8, bias=torch.zeros(64)), on_cuda(), "bias"),
])
def test_int8_layer_that_kitchen_treats_otherwise(layer, data, word):
    assert word in linear_input(layer, data, HOME).reason


@pytest.mark.parametrize("params, word", [
    ({"convrot": False}, "not ConvRot"), ({"convrot_groupsize": 128}, "not ConvRot"), ({"transposed": True}, "transposed")])
def test_int8_weight_of_another_kind(params, word):
    layer = Linear(INT8)
    vars(layer.weight._params).update(params)
    assert word in linear_input(layer, on_cuda(), HOME).reason


def test_foreign_forwards():
    layer = Linear()
    assert foreign(layer, HOME) is None
    assert "Linear.forward is" in foreign(layer, "comfy.ops")
    layer.forward = types.MethodType(lambda self, x: x, layer)
    assert "Linear.forward is" in foreign(layer, HOME)
    layer.forward = types.MethodType(Linear.forward, layer)  # what ComfyUI leaves behind after undoing an object patch
    assert foreign(layer, HOME) is None


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_make_a_module_foreign(register):
    layer = Linear()
    handle = getattr(layer, register)(lambda *_: None)
    assert "hooks" in foreign(layer, HOME)
    handle.remove()
    assert foreign(layer, HOME) is None


def test_wrapped_class_forward_is_foreign(monkeypatch):
    import functools

    original = Linear.forward

    @functools.wraps(original)
    def wrapper(self, x):
        return original(self, x)

    monkeypatch.setattr(Linear, "forward", wrapper)
    assert "Linear.forward is" in foreign(Linear(), HOME)


def test_foreign_layer_gets_plain_input():
    layer = Linear()
    layer.forward = types.MethodType(lambda self, x: x, layer)
    assert "Linear.forward is" in linear_input(layer, x(), HOME).reason


@pytest.mark.parametrize("folder", ["/home/someone/ComfyUI/custom_nodes/Some-Pack", r"C:\ComfyUI\custom_nodes\Some-Pack"])
def test_origin_leaves_the_folder_out(folder):
    def function():
        pass

    function.__module__ = f"{folder}.nodes.patch"
    assert origin(function) == "Some-Pack.nodes.patch." + function.__qualname__


def test_norms():
    assert norm_problem(Norm(), x(), HOME) is None
    assert norm_problem(Norm(dtype=torch.float32, casts=True), x(), HOME) is None
    assert "weight is float32" in norm_problem(Norm(dtype=torch.float32), x(), HOME)
    assert "without a weight of the width" in norm_problem(Norm(width=8), x(), HOME)
    assert "Norm.forward is" in norm_problem(Norm(), x(), "comfy.ops")


def test_kind_names_storage_and_state():
    block = SimpleNamespace(
        attn=SimpleNamespace(qkv_proj=Linear(), out_proj=Linear(), heads=2, head_dim=128), mlp=SimpleNamespace(fc1=Linear(), fc2=Linear()),
        norm1=Norm(), adaln_proj=SimpleNamespace(linear=Norm()))
    plain = kind(block)
    assert NVFP4 in plain and "heads=2x128" in plain
    block.mlp.fc1 = Linear(weight_function=[len])
    assert kind(block) != plain and "weight_function" in kind(block)

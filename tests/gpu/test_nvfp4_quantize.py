"""``nvfp4_quantize`` against comfy-kitchen on the GPU, byte for byte, and what the launches of all NVFP4 ops keep."""

import comfy_kitchen
import pytest
import torch
from h3_vortex.kernels import nvfp4_quantize as op
from h3_vortex.kernels import stock
from h3_vortex.kernels.dispatch import use_backend
from h3_vortex.tests.gpu import data
from h3_vortex.tests.gpu.nvfp4 import FAST, WIDTH, assert_stock_bytes, differing

forbidden = pytest.mark.usefixtures("reference_forbidden")
backends = pytest.mark.parametrize("backend", ["cuda", "triton"])
static = pytest.mark.parametrize("scale", [None, 0.0015])
ops = pytest.mark.parametrize("name", stock.NVFP4_OPS)
TOKENS = 2049


def make(tokens, device, **options):
    return stock.make("nvfp4_quantize", tokens, device, **{"width": 7168, **options})


@forbidden
@backends
@static
@pytest.mark.parametrize("name", data.EVERY)
def test_data(gpu, backend, scale, name):
    assert_stock_bytes(make(data.CANONICAL, gpu, draw=data.draw(name), tensor_scale=scale), backend)


@forbidden
@backends
@pytest.mark.parametrize("tokens", data.ROWS)
def test_rows(gpu, backend, tokens):
    data.require_memory(tokens, 7168)
    assert_stock_bytes(make(tokens, gpu, draw=data.draw("lognormal")), backend)


@forbidden
@backends
@static
@pytest.mark.parametrize("width", [16, 48, 64, 1008, 4096, 5376, 14336])
def test_widths(gpu, backend, scale, width):
    assert_stock_bytes(make(333, gpu, width=width, draw=data.draw("row_scales"), tensor_scale=scale), backend)


@forbidden
@backends
@pytest.mark.parametrize("scale", [1.0, 0.00146484375, 3.4e-5, 0.0, 1e-39, 1.2e-38, 1e30, 3e38, float("inf"), float("nan")])
def test_every_value_under_adversarial_scales(gpu, backend, scale):
    """All bit patterns in every kind of company: alone in a block of zeros, among their neighbours, and blocks of NaN alone."""
    bits = torch.arange(65_536, dtype=torch.int32, device=gpu).to(torch.int16).view(torch.bfloat16)
    alone = torch.zeros(65_536, 16, dtype=torch.bfloat16, device=gpu)
    alone[:, 3], alone[:, 8] = bits, -bits
    neighbours = bits.view(4096, 16)
    nan = torch.full((16, 16), float("nan"), dtype=torch.bfloat16, device=gpu)
    middles = torch.tensor([6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5, -.25, -.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0], device=gpu).bfloat16()
    x = torch.cat([alone, neighbours, -neighbours, nan, middles[None]])
    tensor_scale = torch.tensor(scale, device=gpu)
    expected = stock.quantize_nvfp4(x, tensor_scale)
    with use_backend(backend):
        got = op.nvfp4_quantize(x, tensor_scale)
    assert differing(got, expected) == 0 and got[1] is tensor_scale


@forbidden
@backends
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-37, 3e38, float("inf"), float("nan")])
def test_uniform_tensors(gpu, backend, value):
    x = torch.full((130, 320), value, dtype=torch.bfloat16, device=gpu)
    with use_backend(backend):
        assert differing(op.nvfp4_quantize(x), stock.quantize_nvfp4(x)) == 0


@forbidden
@backends
def test_strided_rows(gpu, backend):
    x = torch.randn(257, 3 * 512, device=gpu).bfloat16()[:, 512:1024]
    with use_backend(backend):
        assert differing(op.nvfp4_quantize(x), stock.quantize_nvfp4(x.contiguous())) == 0


@forbidden
def test_conversions_without_their_instructions(gpu):
    """What a chip without E2M1 or E4M3 instructions runs, on this one."""
    x = data.draw("row_scales")((4099, 5376), gpu).bfloat16()
    strip = op.Strip("nvfp4_quantize", ("P", "q"), x.shape, x.get_device(), True, FORCE_SOFTWARE=1)
    assert differing(strip(x.device, None, (x.data_ptr(),), (x.stride(0),)), stock.quantize_nvfp4(x)) == 0


def test_every_amax_gives_torch_s_tensor_scale(gpu):
    """All non-negative bf16: amax / 2688 in bf16, as torch's division rounds it."""
    for value in torch.arange(0, 0x7F81, 61, dtype=torch.int16, device=gpu).view(torch.bfloat16):
        x = value.expand(16, 16).contiguous()
        assert torch.equal(op.nvfp4_quantize(x)[1], stock.quantize_nvfp4(x)[1])


def test_the_contract_is_what_comfyui_runs_here(gpu):
    cuda = torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) >= 13
    if not cuda:
        pytest.skip("ComfyUI switches kitchen's CUDA backend off below CUDA 13")
    assert op.stock_contract(gpu) == "cuda"


def test_the_eager_contract_is_kept_where_kitchen_s_cuda_backend_is_off(gpu):
    """A CUDA 12 install: stock quantises with kitchen's eager backend, and so does the op, zero tensors (NaN there) included."""
    tensors = [torch.randn(37, 320, device=gpu).bfloat16(), torch.zeros(16, 64, device=gpu).bfloat16()]
    zeros = op.nvfp4_quantize(tensors[1])
    comfy_kitchen.registry.disable("cuda")
    try:
        assert op.stock_contract(gpu) == "eager"
        for x in tensors:
            assert differing(op.nvfp4_quantize(x), stock.quantize_nvfp4(x)) == 0
            assert op.OP.choose(x, None, "eager") == "eager" and op.OP.choose(x, None, "cuda") == "cuda"
        assert differing(zeros, op.nvfp4_quantize(tensors[1])) > 0
    finally:
        comfy_kitchen.registry.enable("cuda")


def test_a_quantised_tensor_multiplies_like_stock_s(gpu):
    """Dequantised or with FP4 tensor cores, whatever this GPU does for a Linear."""
    x, w = torch.randn(37, 320, device=gpu).bfloat16(), torch.randn(64, 320, device=gpu).bfloat16()
    weight = comfy_kitchen.tensor.QuantizedTensor.from_float(w, op.LAYOUT)
    ours = op.as_quantized(op.nvfp4_quantize(x), x.dtype, x.shape)
    theirs = comfy_kitchen.tensor.QuantizedTensor.from_float(x, op.LAYOUT)
    linear = torch.nn.functional.linear
    assert torch.equal(linear(ours, weight), linear(theirs, weight))


# ---- launches of all NVFP4 ops ----------------------------------------------------------------------------------------------------


def case_of(name, device, tokens=TOKENS, scale=None):
    return stock.make(name, tokens, device, width=WIDTH.get(name, 5376), tensor_scale=scale)


@forbidden
@ops
def test_the_automatic_choice_is_cuda(gpu, name):
    case = case_of(name, gpu)
    assert differing(case.ours(*case.inputs()), case.stock(*case.inputs())) == 0


@forbidden
@ops
@static
def test_side_stream(gpu, name, scale):
    case = case_of(name, gpu, scale=scale)
    expected, late = case.stock(*case.inputs()), case.inputs()
    case.ours(*case.inputs())
    source = late[0].clone()
    late[0].zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late[0].copy_(source)
        got = case.ours(*late)
    stream.synchronize()
    assert differing(got, expected) == 0


@forbidden
@ops
@static
def test_graph_capture_and_replay(gpu, name, scale):
    case = case_of(name, gpu, scale=scale)
    expected, arguments = case.stock(*case.inputs()), case.inputs()
    source = arguments[0].clone()
    case.ours(*case.inputs())  # plan and compile before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        arguments[0].copy_(source)
        got = case.ours(*arguments)
    for _ in range(3):
        for tensor in got:
            if scale is None or tensor.dim():  # a given scale is an input
                tensor.view(-1).view(torch.uint8).fill_(0xA5)
        arguments[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert differing(got, expected) == 0


@forbidden
@ops
def test_not_the_current_device(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = case_of(name, other)
    assert differing(case.ours(*case.inputs()), case.stock(*case.inputs())) == 0
    assert torch.cuda.current_device() != other.index


@forbidden
@ops
@static
def test_memory_does_not_grow(gpu, name, scale):
    case = case_of(name, gpu, scale=scale)
    arguments = case.inputs()
    case.ours(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        case.ours(*arguments)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@forbidden
@pytest.mark.parametrize("name, backend", FAST)
def test_inputs_are_not_written(gpu, name, backend):
    case = case_of(name, gpu)
    arguments = case.inputs()
    before = arguments[0].clone()
    with use_backend(backend):
        case.ours(*arguments)
    assert torch.equal(arguments[0], before) != name.startswith("gate")


@forbidden
@ops
def test_no_tokens(gpu, name):
    case = stock.make(name, 0, gpu, width=WIDTH.get(name, 5376), segments=[(0, 0, 1)])
    q, scale, blocks = case.ours(*case.inputs())[:3]
    assert q.shape[0] == blocks.shape[0] == 0 and scale.item() == 0

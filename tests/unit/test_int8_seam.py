"""The seam into comfy-kitchen's INT8 GEMM: which versions it knows, when it steps aside, and the exact calls it makes."""

import inspect
import types

import pytest
import torch
from h3_vortex.kernels import int8_seam, quantize_rotate_int8, swiglu_int8

# First docstring line of each private function, as found in the published Linux wheels. Same in every version looked at but for the bias
# dtype that cutlass_int8_dequant reads (fp32 in 0.2.31, the output dtype later), which a Linear without bias does not meet.
AB = "a: ndarray[dtype=int8, shape=(*, *), device='cuda'], b: ndarray[dtype=int8, shape=(*, *), device='cuda']"
SIGNATURES = {
    "cutlass_int8_dequant": f"({AB}, xs: ndarray[dtype=float32, device='cuda'], ws: ndarray[dtype=float32, device='cuda'], "
    "bias: ndarray[device='cuda'], d: ndarray[shape=(*, *), device='cuda'], out_dtype_code: int, stream_ptr: int) -> bool",
    "cublas_gemm_int8": f"({AB}, c: ndarray[dtype=int32, shape=(*, *), device='cuda'], workspace: ndarray[device='cuda'], "
    "stream_ptr: int) -> None",
    "dequantize_int8_linear": "(input: ndarray[dtype=int32, shape=(*, *), device='cuda'], x_scales: ndarray[dtype=float32, shape=(*, *), "
    "device='cuda'], weight_scales: ndarray[dtype=float32, device='cuda'], bias: ndarray[device='cuda'], "
    "output: ndarray[shape=(*, *), device='cuda'], output_dtype_code: int, stream_ptr: int) -> None",
}
# Parameters of backends.cuda.quantize_int8_rowwise_convrot64, which the stock chains call, by version; the defaults follow group_size.
OLDER = ("weight_2d", "group_size", "stochastic_rounding", "input_act")
NEWER = (*OLDER, "input_act_weight", "input_act_eps")
QUANTISER = {"0.2.31": OLDER, "0.2.33": OLDER, "0.2.36": NEWER, "0.2.38": NEWER, "0.2.40": NEWER}


class Extension:
    """Stands in for ``_C``: records the calls; ``answer`` is what the CUTLASS route says."""

    def __init__(self, answer=True, change=None):
        self.calls, self.answer = [], answer
        for name, text in (SIGNATURES | (change or {})).items():
            if text is not None:
                setattr(self, name, self._function(name, text))

    def _function(self, name, text):
        def function(*args):
            self.calls.append((name, args))
            return self.answer if name == "cutlass_int8_dequant" else None

        function.__doc__ = f"{name}{text}\n\nwhat it does"
        return function


def fake_cuda(extension=None, **changes):
    """``comfy_kitchen.backends.cuda`` as far as the seam uses it. Tensors are passed on unwrapped, so that calls can be looked at."""
    members = {
        "_C": extension or Extension(),
        "_wrap_for_dlpack": lambda t: t,
        "_empty_cuda_tensor": lambda device, dtype: torch.empty(0, dtype=dtype),
        "get_cublas_workspace": lambda: "workspace",
        "_prefer_cublas_int8_fallback": lambda m, n, k, index: False,
        "_cuda_device_supports_cutlass_int8_dequant": lambda t: True,
        "_convrot_fused_shared_memory_fits": lambda x, k, group: True,
        "_DISABLE_CUTLASS_INT8": False,
        "DTYPE_TO_CODE": {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2},
        "quantize_int8_rowwise_convrot64": lambda *a: None,
    } | changes
    return types.SimpleNamespace(**{k: v for k, v in members.items() if v is not ...})


# ---- signatures ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", QUANTISER)
def test_known_versions(monkeypatch, version):
    """Accepted, and the stock chains call that version's quantiser with arguments it takes, meaning what they should."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if index < 2 else None)
        for index, name in enumerate(QUANTISER[version])
    ]
    calls = []
    cuda = fake_cuda(quantize_int8_rowwise_convrot64=lambda *a, **k: calls.append(inspect.Signature(parameters).bind(*a, **k).arguments))
    assert int8_seam.probe(cuda) is None
    install(monkeypatch, cuda)
    x = Input(4, 512)
    quantize_rotate_int8.stock(x)
    swiglu_int8.stock(x)
    assert calls == [
        {"weight_2d": x, "group_size": 256, "stochastic_rounding": 0},
        {"weight_2d": x, "group_size": 256, "stochastic_rounding": 0, "input_act": "swiglu"},
    ]


def test_the_stock_quantiser_is_cuda_only(monkeypatch):
    """Kitchen's other backends would answer too, with other bytes."""
    install(monkeypatch, fake_cuda())
    with pytest.raises(int8_seam.SeamUnavailable, match="other backends give other bytes"):
        quantize_rotate_int8.stock(torch.zeros(4, 512, dtype=torch.bfloat16))


def test_the_installed_kitchen_is_one_of_them():
    """The recorded signatures are those of the extension that is installed here (it loads without a GPU)."""
    cuda = pytest.importorskip("comfy_kitchen.backends.cuda")
    if getattr(cuda, "_C", None) is None:
        pytest.skip("comfy-kitchen's CUDA extension does not load on this machine")
    for name, text in SIGNATURES.items():
        assert getattr(cuda._C, name).__doc__.split("\n")[0] == name + text
    assert int8_seam.probe(cuda) is None


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_missing_route_is_named(name):
    assert int8_seam.probe(fake_cuda(Extension(change={name: None}))) == f"needs comfy-kitchen's {name}, which this version does not have"


def test_a_changed_signature_is_shown():
    text = SIGNATURES["cutlass_int8_dequant"].replace("out_dtype_code", "residual: ndarray[device='cuda'], out_dtype_code")
    reason = int8_seam.probe(fake_cuda(Extension(change={"cutlass_int8_dequant": text})))
    assert "this version has (a, b, xs, ws, bias, d, residual, out_dtype_code, stream_ptr)" in reason


def test_reordered_parameters_are_a_change():
    text = SIGNATURES["cutlass_int8_dequant"].replace("xs:", "_:").replace("ws:", "xs:").replace("_:", "ws:")
    assert "(a, b, ws, xs, bias" in int8_seam.probe(fake_cuda(Extension(change={"cutlass_int8_dequant": text})))


def test_an_unreadable_signature_is_a_change():
    assert "no readable signature" in int8_seam.probe(fake_cuda(Extension(change={"cublas_gemm_int8": " takes things"})))


@pytest.mark.parametrize("name", int8_seam.HELPERS)
def test_a_missing_helper_is_named(name):
    assert int8_seam.probe(fake_cuda(**{name: ...})) == f"needs comfy-kitchen's backends.cuda.{name}, which this version does not have"


def test_an_extension_that_did_not_load():
    assert "CUDA extension" in int8_seam.probe(fake_cuda(_C=None))


# ---- which backend kitchen itself would take --------------------------------------------------------------------------------------
def install(monkeypatch, cuda, backend="cuda"):
    class NoCapableBackendError(Exception):
        pass

    def choose(name):
        assert name == "int8_linear"
        if backend is None:
            raise NoCapableBackendError("nobody")
        return backend

    modules = (cuda, types.SimpleNamespace(get_capable_backend=choose), types.SimpleNamespace(NoCapableBackendError=NoCapableBackendError))
    monkeypatch.setattr(int8_seam, "_installed", lambda: (modules, None))


@pytest.mark.parametrize(("backend", "words"), [
    ("cuda", None), ("eager", "eager is chosen"), ("ascend", "ascend is chosen"), (None, "nobody"),
])
def test_kitchen_must_choose_its_cuda_backend(monkeypatch, backend, words):
    install(monkeypatch, fake_cuda(), backend)
    reason = int8_seam.unavailable_reason()
    assert reason is None if words is None else words in reason


def test_without_kitchen_everything_says_so(monkeypatch):
    def missing(name):
        raise ImportError("No module named 'comfy_kitchen'")

    monkeypatch.setattr(int8_seam.importlib, "import_module", missing)
    modules, reason = int8_seam._installed.__wrapped__()
    assert modules is None and "No module named 'comfy_kitchen'" in reason
    monkeypatch.setattr(int8_seam, "_installed", lambda: (modules, reason))
    assert int8_seam.unavailable_reason() == reason
    with pytest.raises(int8_seam.SeamUnavailable, match="needs comfy-kitchen"):
        int8_seam.kitchen()


# ---- the call's own conditions -----------------------------------------------------------------------------------------------------
class Input:
    """The properties of a CUDA tensor without one."""

    def __init__(self, *shape, dtype=torch.bfloat16, device="cuda:0"):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device(device)

    def dim(self):
        return len(self.shape)

    def numel(self):
        return self.shape.numel()

    def flatten(self, first, last):
        return Input(self.shape[:-1].numel(), self.shape[-1], dtype=self.dtype, device=self.device)


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU; attributes change what it says."""
    state = types.SimpleNamespace(capability=(9, 0), capturing=False, fits=True)
    install(monkeypatch, fake_cuda(_convrot_fused_shared_memory_fits=lambda x, k, group: state.fits))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


@pytest.mark.parametrize(("x", "columns", "words"), [
    (Input(3, 5376), 5376, None),
    (Input(1, 40, 5376), 5376, None),
    (Input(40, 28672), 14336, None),
    (Input(40, 5376, device="cpu"), 5376, "on cpu"),
    (Input(40, 5376, dtype=torch.float16), 5376, "bfloat16"),
    (Input(40, 5000), 5000, "multiple of 256 columns from 256 to 16384, got 5000"),
    (Input(40, 16640), 16640, "got 16640"),
    (Input(40, 512), 5376, "input of 5376 columns"),
    (Input(2, 5376), 5376, "more than 2 rows, got 2"),
    (Input(1, 2, 5376), 5376, "more than 2 rows, got 2"),
    (Input(0, 5376), 5376, "more than 2 rows, got 0"),
])
def test_call_reason(gpu, x, columns, words):
    reason = int8_seam.call_reason(x, columns)
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(("name", "value", "words"), [
    ("capability", (7, 5), "compute capability 8.0"), ("fits", False, "shared memory"), ("capturing", True, "captured"),
])
def test_call_reason_of_the_gpu(gpu, name, value, words):
    setattr(gpu, name, value)
    assert words in int8_seam.call_reason(Input(40, 5376), 5376)


# ---- the calls -------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def multiply(monkeypatch):
    """``_multiply`` on CPU tensors, with a stand-in for the stream handle."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=77))
    q, scale = torch.ones(4, 256, dtype=torch.int8), torch.ones(4, 1)
    weight = torch.ones(8, 256, dtype=torch.int8)

    def run(extension, weight_scale=None, out_dtype=torch.bfloat16, **changes):
        weight_scale = torch.arange(8.0).view(8, 1) if weight_scale is None else weight_scale
        out = int8_seam._multiply(fake_cuda(extension, **changes), q, scale, weight, weight_scale, out_dtype)
        return out, q, scale, weight

    return run


def test_cutlass_gets_eight_arguments_in_order(multiply):
    extension = Extension()
    out, q, scale, weight = multiply(extension)
    ((name, args),) = extension.calls
    assert name == "cutlass_int8_dequant" and len(args) == 8
    assert args[0] is q and args[1] is weight and args[2] is scale and args[5] is out
    assert torch.equal(args[3], torch.arange(8.0)) and args[3].is_contiguous()
    assert args[4].numel() == 0 and args[4].dtype == torch.bfloat16
    assert args[6:] == (2, 77) and out.shape == (4, 8) and out.dtype == torch.bfloat16


def test_one_weight_scale_is_spread_over_the_columns(multiply):
    extension = Extension()
    multiply(extension, torch.tensor(0.5))
    assert torch.equal(extension.calls[0][1][3], torch.full((8,), 0.5))


CUBLAS = ["cublas_gemm_int8", "dequantize_int8_linear"]


@pytest.mark.parametrize(("answer", "changes", "routes"), [
    (False, {}, ["cutlass_int8_dequant", *CUBLAS]),
    (True, {"_DISABLE_CUTLASS_INT8": True}, CUBLAS),
    (True, {"_prefer_cublas_int8_fallback": lambda m, n, k, index: (m, n, k) == (4, 8, 256)}, CUBLAS),
    (True, {"_cuda_device_supports_cutlass_int8_dequant": lambda t: False}, CUBLAS),
])
def test_cublas_pair_where_kitchen_takes_it(multiply, answer, changes, routes):
    extension = Extension(answer)
    out, q, scale, weight = multiply(extension, torch.tensor([0.5]), torch.float16, **changes)
    assert [name for name, _ in extension.calls] == routes
    (_, gemm), (_, dequantise) = extension.calls[-2:]
    assert gemm[0] is q and gemm[1] is weight and gemm[2].dtype == torch.int32 and gemm[2].shape == (4, 8) and gemm[3:] == ("workspace", 77)
    assert dequantise[0] is gemm[2] and dequantise[1] is scale and torch.equal(dequantise[2], torch.tensor([0.5]))
    assert dequantise[3].numel() == 0 and dequantise[4] is out and dequantise[5:] == (1, 77)


Q, S, W = torch.ones(4, 256, dtype=torch.int8), torch.ones(4, 1), torch.ones(8, 256, dtype=torch.int8)


@pytest.mark.parametrize(("pair", "weight", "weight_scale", "words"), [
    ((Q, S), W[:, :128], torch.ones(8), r"need q \[S, K\] and weight \[N, K\]"),
    ((Q, S), torch.ones(256, 8, dtype=torch.int8).t(), torch.ones(8), "weight must be contiguous"),
    ((Q.float(), S), W, torch.ones(8), "q must be contiguous torch.int8"),
    ((Q, S.view(4)), W, torch.ones(8), r"scale must be \[4, 1\]"),
    ((Q, S), W, torch.ones(7), "weight_scale must have 1 or 8 values"),
])
def test_operands_that_do_not_fit(monkeypatch, pair, weight, weight_scale, words):
    install(monkeypatch, fake_cuda())
    with pytest.raises(ValueError, match=words):
        int8_seam.linear(pair, weight, weight_scale)


def test_cpu_tensors_and_captures_are_refused(monkeypatch):
    install(monkeypatch, fake_cuda())
    with pytest.raises(int8_seam.SeamUnavailable, match="q is on cpu"):
        int8_seam.linear((Q, S), W, torch.ones(8))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda:0"))
    monkeypatch.setattr(int8_seam, "_check_operands", lambda *a: None)
    with pytest.raises(int8_seam.SeamUnavailable, match="captured"):
        int8_seam.linear((on_gpu, S), W, torch.ones(8))


def test_the_compiled_route_knows_its_shape():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, scale = torch.empty(40, 256, dtype=torch.int8), torch.empty(40, 1)
        weight, weight_scale = torch.empty(8, 256, dtype=torch.int8), torch.empty(8)
        out = torch.ops.h3_vortex.int8_linear(q, scale, weight, weight_scale, torch.float16)
    assert out.shape == (40, 8) and out.dtype == torch.float16

"""NVFP4 activations: bf16 ``[S, K]`` to E2M1 data, one E4M3 scale per 16 columns and one fp32 tensor scale, as comfy-kitchen packs them.

Stock (``comfy.ops`` Linear) calls ``QuantizedTensor.from_float(x, "TensorCoreNVFP4Layout", scale=input_scale)``: ``abs``, ``amax`` and a
division when there is no ``input_scale``, then ``comfy_kitchen.quantize_nvfp4``. kitchen's kernel is exact but takes scalar loads whenever
the row count is not a multiple of 16, and the scale costs two more passes; hence this op. Its fused forms are :mod:`.modulate_nvfp4`
and :mod:`.swiglu_nvfp4`.

**Which bytes.** kitchen's backends do not agree with each other (true division or an approximate reciprocal, signed zeros, NaN), so
every op here carries a *contract*: the name of the kitchen backend whose bytes it gives. :func:`stock_contract` asks kitchen's registry
which one it would run; ComfyUI leaves ``cuda`` on a CUDA 13 torch and ``eager`` elsewhere. The fast backends implement ``cuda``
only, so elsewhere the stock call itself runs. The ``cuda`` contract, in fp32 with subnormals flushed, ``rcp`` the approximate reciprocal:

1. Tensor scale ``g``: ``input_scale``, or ``amax|x| / 2688`` rounded to the dtype of ``x`` (bf16), then widened.
2. Rows and columns are padded with +0 to multiples of 16; a block is 16 consecutive columns of one row.
3. ``s = min(amax * fl(1/6) * rcp(g), 448)``, NaN elements ignored, a NaN ``s`` becoming 448; stored as E4M3, round to nearest even.
4. ``enc = min(rcp(g * e4m3(s)), FLT_MAX)``; ``code = e2m1(x * enc)``: nearest even, saturating at 6, -0 kept, NaN to +6.
   A block whose scale underflowed to 0 therefore holds +-6 codes, worth 0.
5. The even column is in the high nibble. Scales are swizzled in cuBLAS 128x4 tiles, zero beyond the padded data.
"""

import functools

import torch

from . import nvrtc, rules
from .dispatch import Op, Planned, Rule

LAYOUT = "TensorCoreNVFP4Layout"
SCALE_DIVISOR = 2688.0  # 448 * 6, the largest E4M3 times the largest E2M1
ONE_SIXTH = 0.16666667163372040  # fp32(1/6): kitchen's kernel multiplies
FLT_MAX = torch.finfo(torch.float32).max
_FLT_MIN = torch.finfo(torch.float32).tiny

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def _kitchen():
    import comfy_kitchen
    import comfy_kitchen.tensor

    return comfy_kitchen


@functools.lru_cache(maxsize=64)
def _capable(device: torch.device, dtype: torch.dtype, enabled: tuple[bool, ...]) -> str:
    probe = {"x": torch.empty(16, 16, dtype=dtype, device=device), "per_tensor_scale": torch.empty((), dtype=torch.float32, device=device)}
    return _kitchen().registry.get_capable_backend("quantize_nvfp4", probe)


def stock_contract(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """The kitchen backend that stock would quantise with on ``device``: ``cuda``, ``triton`` or ``eager``.

    Asked of kitchen's registry, so it follows what ComfyUI (or the user) enabled; remembered per device, dtype and set of enabled backends.
    """
    registry = _kitchen().registry
    return _capable(device, dtype, tuple(registry.is_available(name) for name in ("cuda", "triton", "eager")))


def padded(rows: int, columns: int) -> tuple[int, int, int, int]:
    """``(M16, K16, scale rows, scale columns)`` of the quantised form of ``[rows, columns]``."""
    m16, k16 = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    return m16, k16, (m16 + 127) // 128 * 128, (k16 // 16 + 3) // 4 * 4


# ---- reference ------------------------------------------------------------------------------------------------------------------


def reference(x: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str) -> Triple:
    """The contract: kitchen's own call on its backend ``contract``; without a GPU, its CUDA backend written out in torch.

    That emulation (:func:`emulate_cuda`) models ``rcp.approx`` as correctly rounded, which the instruction is not always (it may be
    1 ulp off), so exact agreement with a chip is established on that chip only.
    """
    x = x.contiguous()
    if x.shape[0] == 0:  # stock raises in amax; nothing to quantise is no error here
        return empty_triple(x, x.shape[1], tensor_scale)
    if contract == "cuda" and x.device.type != "cuda":
        return emulate_cuda(x, tensor_scale)
    with _kitchen().registry.use_backend(contract):
        qdata, params = _kitchen().tensor.get_layout_class(LAYOUT).quantize(x, scale=tensor_scale)
    return qdata, params.scale, params.block_scale


def empty_triple(x: torch.Tensor, columns: int, tensor_scale: torch.Tensor | None) -> Triple:
    """The result for no tokens; a dynamic tensor scale is 0."""
    qdata, scales = allocate(0, columns, x.device)
    return qdata, x.new_zeros((), dtype=torch.float32) if tensor_scale is None else tensor_scale, scales.view(torch.float8_e4m3fn)


def _ftz(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t.abs() < _FLT_MIN, t * 0.0, t)


def _rcp(t: torch.Tensor) -> torch.Tensor:
    return _ftz(1.0 / _ftz(t))


# |y| >= boundary counts up the code; ties go to the even code, so every other boundary lies just above the midpoint
_E2M1_BOUNDARIES = tuple(
    midpoint if code % 2 == 0 else torch.nextafter(torch.tensor(midpoint), torch.tensor(torch.inf)).item()
    for code, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), start=1)
)


def e2m1_codes(y: torch.Tensor) -> torch.Tensor:
    """fp32 to 4-bit E2M1 codes (uint8), round to nearest even, saturating at 6, NaN to +6, as ``cvt.rn.satfinite.e2m1x2.f32``."""
    boundaries = torch.tensor(_E2M1_BOUNDARIES, dtype=torch.float32, device=y.device)
    code = torch.bucketize(y.abs(), boundaries, right=True).to(torch.uint8)  # NaN sorts last: 7
    return code | torch.where(torch.signbit(y) & ~torch.isnan(y), 8, 0).to(torch.uint8)


def emulate_cuda(x: torch.Tensor, tensor_scale: torch.Tensor | None) -> Triple:
    """The ``cuda`` contract (module docstring) in torch operations, any device; ``x`` must be ``[S, K]`` with S > 0."""
    if tensor_scale is None:
        tensor_scale = (torch.amax(x.abs()) / SCALE_DIVISOR).to(torch.float32)
    rows, columns = x.shape
    m16, k16, _, _ = padded(rows, columns)
    blocks = torch.nn.functional.pad(x, (0, k16 - columns, 0, m16 - rows)).view(m16, k16 // 16, 16)
    magnitude = blocks.abs()
    amax = torch.where(magnitude.isnan(), -1.0, magnitude).amax(-1).to(torch.float32)
    amax = torch.where(amax < 0, torch.nan, amax)  # a block of NaN alone
    g = tensor_scale.reshape(()).to(torch.float32)
    s = torch.fmin(_ftz(_ftz(_ftz(amax) * ONE_SIXTH) * _rcp(g)), torch.tensor(448.0, device=x.device))
    scale_bytes = s.to(torch.float8_e4m3fn)
    enc = torch.fmin(_rcp(_ftz(g) * scale_bytes.to(torch.float32)), torch.tensor(FLT_MAX, device=x.device))
    codes = e2m1_codes(_ftz(_ftz(blocks.to(torch.float32)) * enc.unsqueeze(-1))).view(m16, k16)
    swizzled = _kitchen().float_utils.to_blocked(scale_bytes.view(torch.uint8), flatten=False)
    return codes[:, 0::2] << 4 | codes[:, 1::2], tensor_scale, swizzled.view(torch.float8_e4m3fn)


# ---- the op ---------------------------------------------------------------------------------------------------------------------


def check_scale(op: str, tensor_scale: torch.Tensor | None, device: torch.device) -> None:
    """Raises ValueError unless ``tensor_scale`` is None or one fp32 value on ``device``."""
    if tensor_scale is not None and (
        tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32 or tensor_scale.device != device
    ):
        raise ValueError(
            f"{op}: tensor_scale must be one float32 value on {device} (a layer's input_scale, cast there), "
            f"got {tensor_scale.dtype} {list(tensor_scale.shape)} on {tensor_scale.device}"
        )


def check(x, tensor_scale, contract) -> None:
    if x.dim() != 2:
        raise ValueError(f"nvfp4_quantize: x must be [S, K], got shape {list(x.shape)}")
    check_scale("nvfp4_quantize", tensor_scale, x.device)


OP = Op("nvfp4_quantize", reference, ("x", "tensor_scale", "contract"), check)


# ---- cuda -----------------------------------------------------------------------------------------------------------------------

CUDA_CONTRACT = Rule(
    "the cuda contract: stock quantises with another comfy-kitchen backend here, whose bytes only that backend gives",
    lambda arguments: arguments["contract"] == "cuda",
)


def block_columns(name: str, halves: int = 1) -> Rule:
    """Whole blocks of 16 columns in each of the ``halves`` of a row."""
    step = 16 * halves
    return Rule(f"the width of {name} to be a multiple of {step}", lambda a: a[name].shape[-1] % step == 0 and a[name].shape[-1] > 0)


def allocate(tokens: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``(qdata, block scales as uint8)``, uninitialised: the kernels write every byte, padding included."""
    m16, k16, scale_rows, scale_columns = padded(tokens, columns)
    return (
        torch.empty((m16, k16 // 2), dtype=torch.uint8, device=device),
        torch.empty((scale_rows, scale_columns), dtype=torch.uint8, device=device),
    )


class Strip:
    """The launches of one strip kernel of ``csrc/nvfp4.cuh`` for one shape: the amax pass when the tensor scale is dynamic, then packing.

    Args:
        name: the source; ``parameters``: formats of its own parameters, ``(before, after)`` the five that all strip kernels share.
        shape: ``(S, K)`` of the values to quantise; ``index``: CUDA device.
        dynamic: no tensor scale is given.
        amax_pass: False when another kernel leaves the amax.
        batches: tokens loaded ahead of the arithmetic, in the amax pass and in packing; registers limit them.
        defines: the source's own.
    """

    MOST_THREADS = 128
    MOST_TOKENS = 32  # per block: a table row read once serves this many
    BLOCKS_PER_SM = 48  # fewer tokens per block rather than fewer blocks than this

    def __init__(
        self, name: str, parameters: tuple[str, str], shape: tuple[int, int], index: int, dynamic: bool, amax_pass: bool = True,
        batches: tuple[int, int] = (4, 2), **defines,
    ):
        self.tokens, self.columns = shape
        self.dynamic = dynamic
        lanes = -(-self.columns // 64) * 4
        self.threads = min(self.MOST_THREADS, -(-lanes // 32) * 32)
        strips = -(-lanes // self.threads)
        multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        most = self.tokens * strips // (multiprocessors * self.BLOCKS_PER_SM) // 4 * 4
        self.tokens_per_block = max(4, min(self.MOST_TOKENS, most))
        self.amax_grid = strips * -(-self.tokens // self.tokens_per_block)
        self.pack_grid = strips * -(-padded(*shape)[2] // self.tokens_per_block)
        formats = f"{parameters[0]}PPPP{parameters[1]}ii"
        common = {"K": self.columns, "THREADS": self.threads, "DYNAMIC": dynamic, **defines}
        self.amax = nvrtc.kernel(name, formats, index, PACK=False, BATCH=batches[0], **common) if dynamic and amax_pass else None
        self.pack = nvrtc.kernel(name, formats, index, PACK=True, BATCH=batches[1], **common)

    def __call__(self, device, tensor_scale, before: tuple, after: tuple, amax: torch.Tensor | None = None) -> Triple:
        """Launch on tensors' ``data_ptr`` values and strides; ``amax`` is given when another kernel left it there."""
        qdata, scales = allocate(self.tokens, self.columns, device)
        if self.dynamic:
            tensor_scale = torch.empty((), dtype=torch.float32, device=device)
            if self.amax is not None:
                amax = torch.zeros(1, dtype=torch.int32, device=device)
                self.amax.launch(
                    self.amax_grid, self.threads, *before, amax.data_ptr(), 0, 0, 0, *after, self.tokens, self.tokens_per_block
                )
        self.pack.launch(
            self.pack_grid, self.threads, *before, 0 if amax is None else amax.data_ptr(), tensor_scale.data_ptr(),
            qdata.data_ptr(), scales.data_ptr(), *after, self.tokens, self.tokens_per_block,
        )
        return qdata, tensor_scale, scales.view(torch.float8_e4m3fn)


def _plan_cuda(x, tensor_scale, contract):
    if x.shape[0] == 0:
        return lambda x, tensor_scale, contract: empty_triple(x, x.shape[1], tensor_scale)
    strip = Strip("nvfp4_quantize", ("P", "q"), x.shape, x.get_device(), tensor_scale is None, batches=(4, 4))
    device, stride = x.device, (x.stride(0),)

    def launch(x, tensor_scale, contract):
        return strip(device, tensor_scale, (x.data_ptr(),), stride)

    return launch


def _run_triton(x, tensor_scale, contract):
    from .triton_ops import nvfp4_quantize as kernels

    return kernels.nvfp4_quantize(x, tensor_scale)


_DTYPES = {"x": rules.BF16}
OP.add_backend("cuda", Planned(_plan_cuda), rules.cuda(_DTYPES, CUDA_CONTRACT, block_columns("x"), rules.vector_rows("x")))
OP.add_backend("triton", _run_triton, rules.triton(_DTYPES, CUDA_CONTRACT, block_columns("x"), rules.dense("x")))


def nvfp4_quantize(x: torch.Tensor, tensor_scale: torch.Tensor | None = None, contract: str | None = None) -> Triple:
    """Quantise ``x`` as stock's ``QuantizedTensor.from_float`` would.

    Args:
        x: ``[S, K]`` bf16 (other dtypes run on the ``eager`` backend); only read.
        tensor_scale: one fp32 value on the device of ``x`` (a layer's ``input_scale``), or None: ``amax|x| / 2688``, computed here.
        contract: the kitchen backend whose bytes to give; None asks :func:`stock_contract`.

    Returns:
        ``(qdata uint8 [M16, K16/2], tensor_scale fp32 [], block_scale float8_e4m3fn [roundup(M16, 128), roundup(K16/16, 4)])``;
        a given ``tensor_scale`` is returned as it is. :func:`as_quantized` wraps the triple for a Linear layer.

    Raises:
        ValueError: ``x`` is not ``[S, K]``, or ``tensor_scale`` is not one fp32 value on its device.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_registered(x, tensor_scale, contract), tensor_scale)
    return OP(x, tensor_scale, contract or stock_contract(x.device, x.dtype))


def keep_scale(triple: Triple, tensor_scale: torch.Tensor | None) -> Triple:
    """The triple with the caller's own ``tensor_scale``: a registered op must not return its input, so it returned a copy."""
    return triple if tensor_scale is None else (triple[0], tensor_scale, triple[2])


def own_scale(triple: Triple, tensor_scale: torch.Tensor | None) -> Triple:
    """The other half of :func:`keep_scale`."""
    return triple if tensor_scale is None else (triple[0], triple[1].clone(), triple[2])


def fake_triple(x: torch.Tensor, columns: int, tensor_scale: torch.Tensor | None) -> Triple:
    """Shapes and dtypes of the result for ``columns`` quantised columns, for ``register_fake``."""
    m16, k16, scale_rows, scale_columns = padded(x.shape[0], columns)
    return (
        x.new_empty(m16, k16 // 2, dtype=torch.uint8),
        x.new_empty((), dtype=torch.float32) if tensor_scale is None else torch.empty_like(tensor_scale),
        x.new_empty(scale_rows, scale_columns, dtype=torch.float8_e4m3fn),
    )


@torch.library.custom_op("h3_vortex::nvfp4_quantize", mutates_args=())
def _registered(
    x: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return own_scale(OP(x, tensor_scale, contract or stock_contract(x.device, x.dtype)), tensor_scale)


@_registered.register_fake
def _fake(x, tensor_scale, contract):
    return fake_triple(x, x.shape[1], tensor_scale)


def as_quantized(triple: Triple, dtype: torch.dtype, shape: tuple[int, int]):
    """The kitchen ``QuantizedTensor`` that ``QuantizedTensor.from_float`` would have made.

    Args:
        triple: what an op of this family returned.
        dtype: dtype of the tensor that was quantised (the GEMM's output takes it).
        shape: its unpadded shape ``(S, K)``.

    Returns:
        ``comfy_kitchen.tensor.QuantizedTensor`` of layout ``TensorCoreNVFP4Layout``; a stock Linear takes it in place of its own
        quantisation. Its parameters are of the class registered under that name, which ComfyUI replaces by its own.
    """
    tensor = _kitchen().tensor
    qdata, tensor_scale, block_scale = triple
    params = tensor.get_layout_class(LAYOUT).Params(
        scale=tensor_scale, orig_dtype=dtype, orig_shape=tuple(shape), block_scale=block_scale
    )
    return tensor.QuantizedTensor(qdata, LAYOUT, params)

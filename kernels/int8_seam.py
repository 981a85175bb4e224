"""The seam into comfy-kitchen's INT8 GEMM: a rotated INT8 pair in, bf16 out, with the bytes of ``comfy_kitchen.int8_linear``.

Kitchen's public ``int8_linear`` takes a floating input only and quantises it itself. Behind that it calls two private routes, which this
module alone touches: ``_C.cutlass_int8_dequant`` and, where that answers False, ``_C.cublas_gemm_int8`` with
``_C.dequantize_int8_linear``. Both give ``bf16((float(acc) * x_scale) * w_scale)`` of the exact int32 product, hence the same bytes.

How a host runs one of its Linears here, decided per Linear and per call:

* The weight comes from the host's own cast (ComfyUI: ``cast_bias_weight(linear, x, offloadable=True, compute_dtype=x.dtype,
  want_requant=True)``, given back with ``uncast_bias_weight``), so LoRA, offload and prefetch stay the host's. A weight that arrives
  dequantised (a weight function) takes the stock call.
* :func:`unavailable_reason` and :func:`call_reason` are asked, the latter with the *unquantised* input that stock would give this
  Linear. A reason means: the stock call.
* The weight must be an untransposed ``TensorWiseINT8Layout`` rotated in groups of 256, and the Linear without bias (kitchen 0.2.31 reads
  it as fp32, newer ones in the output dtype; H3 has none).
* The pair: QKV takes ``norm_modulate_int8`` (first block) or ``gate_norm_modulate_int8``, FC1 ``gate_norm_modulate_int8``
  (:mod:`.norm_modulate_int8`); attention's out_proj :func:`.quantize_rotate_int8.quantize_rotate_int8`; FC2
  :func:`.swiglu_int8.swiglu_int8` on FC1's output. Then ``linear(pair, weight._qdata, weight._params.scale)``.
* The host's own flags are the host's to check: no ``weight_function`` or ``bias_function``, no ``pre_quant_scale``, not
  ``_full_precision_mm``, not ``comfy_force_cast_weights``, not training.
"""

import functools
import importlib
import re

import torch

GROUP = 256  # columns per ConvRot rotation
MAX_COLUMNS = 16384  # kitchen's fused quantiser ends here, and another rotation with other bytes begins

# Parameter names as the extension documents them; unchanged from kitchen 0.2.31 to 0.2.40.
ROUTES = {
    "cutlass_int8_dequant": ("a", "b", "xs", "ws", "bias", "d", "out_dtype_code", "stream_ptr"),
    "cublas_gemm_int8": ("a", "b", "c", "workspace", "stream_ptr"),
    "dequantize_int8_linear": ("input", "x_scales", "weight_scales", "bias", "output", "output_dtype_code", "stream_ptr"),
}
HELPERS = (
    "quantize_int8_rowwise_convrot64", "_wrap_for_dlpack", "_empty_cuda_tensor", "get_cublas_workspace", "_prefer_cublas_int8_fallback",
    "_cuda_device_supports_cutlass_int8_dequant", "_convrot_fused_shared_memory_fits", "_DISABLE_CUTLASS_INT8", "DTYPE_TO_CODE",
)


class SeamUnavailable(RuntimeError):
    """The pair cannot go into kitchen's GEMM; the message says why. The stock Linear still works."""


def parameters(function) -> tuple[str, ...] | None:
    """Parameter names of a nanobind function, from the signature in the first line of its docstring; None when there is none."""
    match = re.match(r"\w+\((.*)\)(?: -> .*)?$", (getattr(function, "__doc__", None) or "").split("\n")[0])
    return None if match is None else tuple(re.findall(r"(\w+): ", re.sub(r"\[[^\]]*\]", "", match.group(1))))


def probe(cuda) -> str | None:
    """None when ``comfy_kitchen.backends.cuda`` (the module given) has the routes as this file calls them, else what is missing or new."""
    extension = getattr(cuda, "_C", None)
    if extension is None:
        return "needs comfy-kitchen's CUDA extension, which did not load here"
    for name, expected in ROUTES.items():
        if not hasattr(extension, name):
            return f"needs comfy-kitchen's {name}, which this version does not have"
        found = parameters(getattr(extension, name))
        if found != expected:
            shown = "no readable signature" if found is None else f"({', '.join(found)})"
            return f"needs comfy-kitchen's {name}({', '.join(expected)}), this version has {shown}"
    for name in HELPERS:
        if not hasattr(cuda, name):
            return f"needs comfy-kitchen's backends.cuda.{name}, which this version does not have"
    return None


@functools.cache
def _installed():
    """``(backends.cuda, registry, exceptions)`` of the installed kitchen and None, or None and the reason; looked up once."""
    try:
        cuda, registry, exceptions = (
            importlib.import_module(f"comfy_kitchen.{name}") for name in ("backends.cuda", "registry", "exceptions"))
    except ImportError as error:
        return None, f"needs comfy-kitchen ({error})"
    reason = probe(cuda)
    return (None if reason else (cuda, registry.registry, exceptions)), reason


def kitchen():
    """``comfy_kitchen.backends.cuda``, probed. Raises :class:`SeamUnavailable` with the reason."""
    modules, reason = _installed()
    if reason:
        raise SeamUnavailable(reason)
    return modules[0]


def unavailable_reason() -> str | None:
    """None when the installed kitchen has the seam and would itself run INT8 Linears on its CUDA backend, else why not."""
    modules, reason = _installed()
    if reason:
        return reason
    _, registry, exceptions = modules
    try:
        backend = registry.get_capable_backend("int8_linear")
    except exceptions.NoCapableBackendError as error:
        return f"needs a comfy-kitchen backend for int8_linear ({error})"
    return None if backend == "cuda" else f"needs comfy-kitchen's cuda backend for int8_linear, {backend} is chosen (cuda is disabled)"


def call_reason(x: torch.Tensor, columns: int) -> str | None:
    """None when stock would rotate, quantise and multiply this call in the way that the pack's INT8 ops reproduce, else the reason.

    Args:
        x: the input stock would give the Linear: ``[..., K]``, or ``[..., 2K]`` for the folded SwiGLU of FC2. Only its properties count.
        columns: K, the Linear's input width.
    """
    if x.device.type != "cuda":
        return f"needs a cuda tensor, the input is on {x.device.type}"
    if x.dtype != torch.bfloat16:
        return f"needs a bfloat16 input, got {x.dtype}"
    if columns % GROUP or not GROUP <= columns <= MAX_COLUMNS:
        return f"needs a multiple of {GROUP} columns from {GROUP} to {MAX_COLUMNS}, got {columns}"
    if x.shape[-1] not in (columns, 2 * columns):
        return f"needs an input of {columns} columns (or twice that for SwiGLU), got {x.shape[-1]}"
    flat = x.flatten(0, -2) if x.dim() > 2 else x
    if flat.dim() != 2 or flat.shape[0] <= 2:
        return f"needs more than 2 rows, got {x.numel() // x.shape[-1]} (stock takes another kernel)"
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return "needs compute capability 8.0"
    if not kitchen()._convrot_fused_shared_memory_fits(flat, columns, GROUP):
        return f"needs shared memory for a row of {columns} columns (stock rotates by a matrix product on this GPU)"
    return "needs a stream that is not being captured" if torch.cuda.is_current_stream_capturing() else None


def quantize(x: torch.Tensor, input_act: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Kitchen's CUDA quantiser, which stock runs in front of its GEMM: rotated codes and row scales of contiguous bf16 ``[S, K]``
    (``[S, 2K]`` with ``"swiglu"``). For verification, tests and benchmarks. Raises :class:`SeamUnavailable` off CUDA.
    """
    cuda = kitchen()
    if x.device.type != "cuda":
        raise SeamUnavailable(f"needs a cuda tensor, got one on {x.device}: comfy-kitchen's other backends give other bytes")
    return cuda.quantize_int8_rowwise_convrot64(x, GROUP, 0, *([] if input_act is None else [input_act]))


def stock(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, input_act: str | None = None
) -> torch.Tensor:
    """Stock's own call on an unquantised input: what a Linear (or, with ``"swiglu"``, ``linear_input_act``) ends in.

    For verification, tests and benchmarks. Shapes as in :func:`linear`; ``x`` is ``[S, K]``, or ``[S, 2K]`` with ``"swiglu"``.
    """
    cuda = kitchen()
    if input_act is None:
        code = cuda.DTYPE_TO_CODE[x.dtype]
        return torch.ops.comfy_kitchen.int8_linear(x, weight, weight_scale, None, code, True, GROUP)
    import comfy_kitchen

    return comfy_kitchen.int8_linear(
        x, weight, weight_scale, None, x.dtype, convrot=True, convrot_groupsize=GROUP, input_act=input_act)


def _check_operands(q, scale, weight, weight_scale) -> None:
    if q.dim() != 2 or weight.dim() != 2 or q.shape[1] != weight.shape[1]:
        raise ValueError(f"int8_seam.linear: need q [S, K] and weight [N, K], got {list(q.shape)} and {list(weight.shape)}")
    for name, tensor, dtype in (("q", q, torch.int8), ("weight", weight, torch.int8), ("scale", scale, torch.float32)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"int8_seam.linear: {name} must be contiguous {dtype}, got {tensor.dtype} with strides {tensor.stride()}")
    if scale.shape != (q.shape[0], 1):
        raise ValueError(f"int8_seam.linear: scale must be [{q.shape[0]}, 1], got {list(scale.shape)}")
    if weight_scale.numel() not in (1, weight.shape[0]):
        raise ValueError(f"int8_seam.linear: weight_scale must have 1 or {weight.shape[0]} values, got {list(weight_scale.shape)}")


def linear(
    pair: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """``(q @ weight.T) * scale * weight_scale`` by kitchen's INT8 GEMM: the bytes of ``int8_linear`` on the input behind ``pair``.

    Args:
        pair: ``(q, scale)``, int8 ``[S, K]`` and fp32 ``[S, 1]``, from an INT8 op of the pack.
        weight: int8 ``[N, K]``, contiguous: ``_qdata`` of the cast weight.
        weight_scale: fp32, one value or ``[N]`` / ``[N, 1]``: ``_params.scale`` of the cast weight.
        out_dtype: bf16 (H3), fp16 or fp32.

    Returns:
        new ``[S, N]`` in ``out_dtype``.

    Raises:
        ValueError: shapes or dtypes do not fit together.
        SeamUnavailable: the installed kitchen has no such route, or the stream is being captured; :func:`unavailable_reason` and
            :func:`call_reason` tell beforehand.
    """
    if torch.compiler.is_compiling():
        return _registered(pair[0], pair[1], weight, weight_scale, out_dtype)
    return _linear(pair[0], pair[1], weight, weight_scale, out_dtype)


def _linear(q, scale, weight, weight_scale, out_dtype):
    cuda = kitchen()
    _check_operands(q, scale, weight, weight_scale)
    if q.device.type != "cuda":
        raise SeamUnavailable(f"needs cuda tensors, q is on {q.device.type}")
    if torch.cuda.is_current_stream_capturing():
        # kitchen 0.2.31 answers False here after it has spoiled the capture
        raise SeamUnavailable("needs a stream that is not being captured")
    with torch.cuda.device(q.device):
        return _multiply(cuda, q, scale, weight, weight_scale, out_dtype)


def _multiply(cuda, q, scale, weight, weight_scale, out_dtype):
    """Kitchen's own sequence behind the quantiser, for a Linear without bias."""
    wrap, extension, code = cuda._wrap_for_dlpack, cuda._C, cuda.DTYPE_TO_CODE[out_dtype]
    rows, (n, k) = q.shape[0], weight.shape
    stream = torch.cuda.current_stream(q.device).cuda_stream
    out = torch.empty((rows, n), dtype=out_dtype, device=q.device)
    weight_scale = weight_scale.to(device=q.device, dtype=torch.float32).reshape(-1)
    no_bias = cuda._empty_cuda_tensor(q.device, out_dtype)
    index = q.get_device()
    if (
        not cuda._DISABLE_CUTLASS_INT8
        and not cuda._prefer_cublas_int8_fallback(rows, n, k, index)
        and cuda._cuda_device_supports_cutlass_int8_dequant(q)
    ):
        per_column = weight_scale if weight_scale.numel() == n else weight_scale.expand(n)
        if extension.cutlass_int8_dequant(
            wrap(q), wrap(weight), wrap(scale), wrap(per_column.contiguous()), wrap(no_bias), wrap(out), code, stream
        ):
            return out
    accumulator = torch.empty((rows, n), dtype=torch.int32, device=q.device)
    extension.cublas_gemm_int8(wrap(q), wrap(weight), wrap(accumulator), wrap(cuda.get_cublas_workspace()), stream)
    extension.dequantize_int8_linear(
        wrap(accumulator), wrap(scale), wrap(weight_scale.contiguous()), wrap(no_bias), wrap(out), code, stream)
    return out


@torch.library.custom_op("h3_vortex::int8_linear", mutates_args=())
def _registered(
    q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return _linear(q, scale, weight, weight_scale, out_dtype)


@_registered.register_fake
def _fake(q, scale, weight, weight_scale, out_dtype):
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=out_dtype)

"""AdaLN modulation straight into NVFP4, alone, after RMSNorm, or after the gated residual and RMSNorm.

``modulate_nvfp4`` is ``nvfp4_quantize(modulate(h))``, ``norm_modulate_nvfp4`` starts from the un-normed stream, and
``gate_norm_modulate_nvfp4`` first adds the gated branch to the stream in place: the three inputs a block's QKV and FC1 layers can have. The
modulated tensor is never written. Stock runs (norm,) ``mul_``, ``add_``, ``abs``, ``amax``, a division and ``quantize_nvfp4``. With a
dynamic tensor scale two passes remain: one for the amax (keeping one fp32 ``rstd`` per row in the norm forms), one that recomputes and
packs; with a given ``tensor_scale`` one pass. comfy-kitchen has no such fusion for NVFP4.
"""

import torch

from . import gate_norm_modulate, modulate, norm_modulate, nvfp4_quantize, nvrtc, rules, segments
from .dispatch import Op, Planned
from .nvfp4_quantize import CUDA_CONTRACT, Strip, Triple, block_columns, empty_triple, fake_triple, keep_scale, own_scale, stock_contract

# ---- modulate_nvfp4 -------------------------------------------------------------------------------------------------------------


def reference(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, tensor_scale: torch.Tensor | None, contract: str
) -> Triple:
    """The contract: :func:`.modulate.reference` on a copy of ``h``, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(modulate.reference(h.clone(), shift, scale, rows), tensor_scale, contract)


def check(h, shift, scale, rows, tensor_scale, contract) -> None:
    segments.check_modulation("modulate_nvfp4", "h", h, rows, shift=shift, scale=scale)
    nvfp4_quantize.check_scale("modulate_nvfp4", tensor_scale, h.device)


OP = Op("modulate_nvfp4", reference, ("h", "shift", "scale", "rows", "tensor_scale", "contract"), check)


def _strip(x, tables: torch.dtype, normed: bool, dynamic: bool) -> Strip:
    return Strip(
        "modulate_nvfp4", ("PPPPPP", "qqq"), x.shape, x.get_device(), dynamic,
        amax_pass=not normed, NORM=normed, TABLE_F32=tables == torch.float32,
    )


def _plan_cuda(h, shift, scale, rows, tensor_scale, contract):
    if h.shape[0] == 0:
        return lambda h, shift, scale, rows, tensor_scale, contract: empty_triple(h, h.shape[1], tensor_scale)
    strip = _strip(h, shift.dtype, normed=False, dynamic=tensor_scale is None)
    device, strides = h.device, (h.stride(0), scale.stride(0), shift.stride(0))

    def launch(h, shift, scale, rows, tensor_scale, contract):
        before = h.data_ptr(), 0, 0, scale.data_ptr(), shift.data_ptr(), rows.data_ptr()
        return strip(device, tensor_scale, before, strides)

    return launch


def _run_triton(h, shift, scale, rows, tensor_scale, contract):
    from .triton_ops import modulate_nvfp4 as kernels

    return kernels.modulate_nvfp4(h, shift, scale, rows, tensor_scale)


_DTYPES = {"h": rules.BF16, "shift": rules.TABLE, "scale": rules.TABLE}
OP.add_backend(
    "cuda", Planned(_plan_cuda),
    rules.cuda(
        _DTYPES, CUDA_CONTRACT, block_columns("h"), rules.one_table_dtype("shift", "scale"), rules.vector_rows("h", "shift", "scale")
    ),
)
OP.add_backend("triton", _run_triton, rules.triton(_DTYPES, CUDA_CONTRACT, block_columns("h"), rules.dense("h", "shift", "scale")))


def modulate_nvfp4(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor,
    tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """``h * (1 + scale[row]) + shift[row]``, rounded as stock rounds it, quantised as stock quantises it. ``h`` is not written.

    Args:
        h: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; only read.
        shift, scale: ``[R, H]`` AdaLN tables in any floating dtype; rounded to ``h.dtype`` first, as stock does.
        rows: int32 ``[S]`` from :func:`.segments.row_map`, values in ``0..R-1`` (not checked on the device).
        tensor_scale: one fp32 value on the device of ``h`` (a layer's ``input_scale``), or None: computed here.
        contract: as in :func:`.nvfp4_quantize.nvfp4_quantize`.

    Returns:
        ``(qdata uint8 [M16, H16/2], tensor_scale fp32 [], block_scale float8_e4m3fn)`` as :func:`.nvfp4_quantize.nvfp4_quantize`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_registered(h, shift, scale, rows, tensor_scale, contract), tensor_scale)
    return OP(h, shift, scale, rows, tensor_scale, contract or stock_contract(h.device, h.dtype))


@torch.library.custom_op("h3_vortex::modulate_nvfp4", mutates_args=())
def _registered(
    h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor,
    tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return own_scale(OP(h, shift, scale, rows, tensor_scale, contract or stock_contract(h.device, h.dtype)), tensor_scale)


@_registered.register_fake
def _fake(h, shift, scale, rows, tensor_scale, contract):
    return fake_triple(h, h.shape[1], tensor_scale)


# ---- norm_modulate_nvfp4 --------------------------------------------------------------------------------------------------------


def norm_reference(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None, contract: str,
) -> Triple:
    """The contract: :func:`.norm_modulate.reference`, then :func:`.nvfp4_quantize.reference` of it."""
    return nvfp4_quantize.reference(norm_modulate.reference(x, weight, shift, scale, rows, eps), tensor_scale, contract)


def norm_check(x, weight, shift, scale, rows, eps, tensor_scale, contract) -> None:
    segments.check_modulation("norm_modulate_nvfp4", "x", x, rows, shift=shift, scale=scale)
    segments.check_weight("norm_modulate_nvfp4", "x", x, weight)
    nvfp4_quantize.check_scale("norm_modulate_nvfp4", tensor_scale, x.device)


NORM_OP = Op(
    "norm_modulate_nvfp4", norm_reference, ("x", "weight", "shift", "scale", "rows", "eps", "tensor_scale", "contract"), norm_check
)


class _NormedRows:
    """Launches of the norm forms: ``norm_modulate_nvfp4.cu``, and for a dynamic tensor scale the strip kernel after it."""

    def __init__(self, x, gated: bool, dynamic: bool):
        self.tokens, width = x.shape
        self.dynamic = dynamic
        self.strip = _strip(x, torch.bfloat16, normed=True, dynamic=True) if dynamic else None
        registers = 4 * -(-width // 512) + 40 + (20 if gated else 0)  # the row's share of a thread, the residual's loads ahead, the rest
        self.grid = self.tokens if dynamic else nvfp4_quantize.padded(*x.shape)[2]
        self.columns = width
        self.rows_kernel = nvrtc.kernel(
            "norm_modulate_nvfp4", "PPPPPPPPPPPPqqqqqif", x.get_device(), K=width, N=width, GATE=gated, PACK=not dynamic, DYNAMIC=dynamic,
            TABLE_F32=False, AHEAD=norm_modulate.AHEAD, MIN_BLOCKS=min(16, 65536 // (64 * registers)),
        )

    def __call__(self, x, other, gate, weight, shift, scale, rows, eps, tensor_scale) -> Triple:
        device = x.device
        shift, scale = segments.rounded(shift), segments.rounded(scale)  # live until the launches are queued
        gate = None if gate is None else segments.rounded(gate)
        pointers = (
            x.data_ptr(), 0 if other is None else other.data_ptr(), 0 if gate is None else gate.data_ptr(), weight.data_ptr(),
            scale.data_ptr(), shift.data_ptr(), rows.data_ptr(),
        )
        strides = (
            x.stride(0), 0 if other is None else other.stride(0), 0 if gate is None else gate.stride(0), scale.stride(0), shift.stride(0),
            self.tokens, eps,
        )
        if not self.dynamic:
            qdata, scales = nvfp4_quantize.allocate(self.tokens, self.columns, device)
            self.rows_kernel.launch(
                self.grid, 64, *pointers, 0, 0, tensor_scale.data_ptr(), qdata.data_ptr(), scales.data_ptr(), *strides
            )
            return qdata, tensor_scale, scales.view(torch.float8_e4m3fn)
        rstd = torch.empty(self.tokens, dtype=torch.float32, device=device)
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        self.rows_kernel.launch(self.grid, 64, *pointers, rstd.data_ptr(), amax.data_ptr(), 0, 0, 0, *strides)
        before = x.data_ptr(), weight.data_ptr(), rstd.data_ptr(), scale.data_ptr(), shift.data_ptr(), rows.data_ptr()
        return self.strip(device, None, before, (x.stride(0), scale.stride(0), shift.stride(0)), amax)


def _norm_plan_cuda(x, weight, shift, scale, rows, eps, tensor_scale, contract):
    if x.shape[0] == 0:
        return lambda x, weight, shift, scale, rows, eps, tensor_scale, contract: empty_triple(x, x.shape[1], tensor_scale)
    launches = _NormedRows(x, gated=False, dynamic=tensor_scale is None)

    def launch(x, weight, shift, scale, rows, eps, tensor_scale, contract):
        return launches(x, None, None, weight, shift, scale, rows, eps, tensor_scale)

    return launch


def _norm_constraints(*tables: str, other: tuple[str, ...] = ()):
    names = "x", "weight", *other, *tables
    return rules.cuda(
        {name: rules.TABLE if name in tables else rules.BF16 for name in names},
        CUDA_CONTRACT, rules.TORCH_RMS_NORM, block_columns("x"), rules.width("x", rules.MAX_NORM_WIDTH),
        rules.vector_rows(*names),
    )


NORM_OP.add_backend("cuda", Planned(_norm_plan_cuda), _norm_constraints("shift", "scale"))


def norm_modulate_nvfp4(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """:func:`modulate_nvfp4` of ``rms_norm(x, weight, eps)``, in torch's reduction order. ``x`` is not written.

    Args:
        x: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; only read.
        weight: ``[H]`` RMSNorm weight; ``eps`` is added to the mean square.
        shift, scale, rows, tensor_scale, contract: as in :func:`modulate_nvfp4`.

    Returns:
        the triple of :func:`modulate_nvfp4`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        return keep_scale(_norm_registered(x, weight, shift, scale, rows, eps, tensor_scale, contract), tensor_scale)
    return NORM_OP(x, weight, shift, scale, rows, eps, tensor_scale, contract or stock_contract(x.device, x.dtype))


@torch.library.custom_op("h3_vortex::norm_modulate_nvfp4", mutates_args=())
def _norm_registered(
    x: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, eps: float,
    tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    contract = contract or stock_contract(x.device, x.dtype)
    return own_scale(NORM_OP(x, weight, shift, scale, rows, eps, tensor_scale, contract), tensor_scale)


@_norm_registered.register_fake
def _norm_fake(x, weight, shift, scale, rows, eps, tensor_scale, contract):
    return fake_triple(x, x.shape[1], tensor_scale)


# ---- gate_norm_modulate_nvfp4 ---------------------------------------------------------------------------------------------------


def gate_norm_reference(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None, contract: str,
) -> Triple:
    """The contract: :func:`.gate_norm_modulate.reference` (``x`` in place), then :func:`.nvfp4_quantize.reference` of its result."""
    h = gate_norm_modulate.reference(x, other, gate, weight, shift, scale, rows, eps)
    return nvfp4_quantize.reference(h, tensor_scale, contract)


def gate_norm_check(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract) -> None:
    segments.check_modulation("gate_norm_modulate_nvfp4", "x", x, rows, gate=gate, shift=shift, scale=scale)
    segments.check_like("gate_norm_modulate_nvfp4", "x", x, other=other)
    segments.check_weight("gate_norm_modulate_nvfp4", "x", x, weight)
    nvfp4_quantize.check_scale("gate_norm_modulate_nvfp4", tensor_scale, x.device)


GATE_NORM_OP = Op(
    "gate_norm_modulate_nvfp4", gate_norm_reference,
    ("x", "other", "gate", "weight", "shift", "scale", "rows", "eps", "tensor_scale", "contract"), gate_norm_check,
)


def _gate_norm_plan_cuda(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract):
    if x.shape[0] == 0:
        return lambda x, *rest: empty_triple(x, x.shape[1], rest[-2])
    launches = _NormedRows(x, gated=True, dynamic=tensor_scale is None)

    def launch(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract):
        return launches(x, other, gate, weight, shift, scale, rows, eps, tensor_scale)

    return launch


GATE_NORM_OP.add_backend("cuda", Planned(_gate_norm_plan_cuda), _norm_constraints("gate", "shift", "scale", other=("other",)))


def gate_norm_modulate_nvfp4(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None = None, contract: str | None = None,
) -> Triple:
    """``x += other * gate[row]`` in place (as ``addcmul_`` rounds it); returns :func:`norm_modulate_nvfp4` of the new ``x``.

    Args:
        x: ``[S, H]`` bf16 (other dtypes run on the ``eager`` backend), unit stride in the last dimension; overwritten.
        other: ``[S, H]``, dtype of ``x``; only read.
        gate: ``[R, H]`` AdaLN table in any floating dtype; rounded to ``x.dtype`` first, as stock does.
        weight, shift, scale, rows, eps, tensor_scale, contract: as in :func:`norm_modulate_nvfp4`.

    Returns:
        the triple of :func:`modulate_nvfp4`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendUnavailable: an explicitly chosen backend cannot run this call.
    """
    if torch.compiler.is_compiling():
        triple = _gate_norm_registered(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)
        return keep_scale(triple, tensor_scale)
    contract = contract or stock_contract(x.device, x.dtype)
    return GATE_NORM_OP(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)


@torch.library.custom_op("h3_vortex::gate_norm_modulate_nvfp4", mutates_args={"x"})
def _gate_norm_registered(
    x: torch.Tensor, other: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor,
    rows: torch.Tensor, eps: float, tensor_scale: torch.Tensor | None, contract: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    contract = contract or stock_contract(x.device, x.dtype)
    triple = GATE_NORM_OP(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract)
    return own_scale(triple, tensor_scale)


@_gate_norm_registered.register_fake
def _gate_norm_fake(x, other, gate, weight, shift, scale, rows, eps, tensor_scale, contract):
    return fake_triple(x, x.shape[1], tensor_scale)

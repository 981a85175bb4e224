"""The ops a runner may use, by name, and whether one may run a given call here."""

import functools
import importlib
from dataclasses import dataclass

from ..dispatch import Op
from . import verification

# op -> (module that holds it, feature switch)
HOMES = {
    "modulate": ("modulate", "norm"),
    "norm_modulate": ("norm_modulate", "norm"),
    "gate_norm_modulate": ("gate_norm_modulate", "norm"),
    "gate": ("gate", "gate"),
    "qk_norm_rope": ("qk_norm_rope", "rope"),
    "swiglu": ("swiglu", "swiglu"),
    "nvfp4_quantize": ("nvfp4_quantize", "nvfp4"),
    "modulate_nvfp4": ("modulate_nvfp4", "nvfp4"),
    "norm_modulate_nvfp4": ("modulate_nvfp4", "nvfp4"),
    "gate_norm_modulate_nvfp4": ("modulate_nvfp4", "nvfp4"),
    "swiglu_nvfp4": ("swiglu_nvfp4", "nvfp4"),
    "quantize_rotate_int8": ("quantize_rotate_int8", "int8"),
    "norm_modulate_int8": ("norm_modulate_int8", "int8"),
    "gate_norm_modulate_int8": ("norm_modulate_int8", "int8"),
    "swiglu_int8": ("swiglu_int8", "int8"),
    "gate_twice": ("gate", "gate"),
    "gate_norm_modulate_twice": ("gate_norm_modulate", "norm"),
    "qk_norm_rope_torch": ("qk_norm_rope", "rope"),
    "swiglu_value_gate": ("swiglu", "swiglu"),
}
# variant -> (the op whose function it is, the argument that selects it)
VARIANTS = {
    "gate_twice": ("gate", {"rounding": "twice"}),
    "gate_norm_modulate_twice": ("gate_norm_modulate", {"rounding": "twice"}),
    "qk_norm_rope_torch": ("qk_norm_rope", {"norm": "torch"}),
    "swiglu_value_gate": ("swiglu", {"order": "value_gate"}),
}


@dataclass(frozen=True)
class Features:
    """Which groups of fusions may run. All of them are class E0: the same bytes as stock.

    ``allow_eager`` lets an op's eager reference take the place of the stock call: it gains nothing and exists so that a machine
    without an accelerator can exercise the runner.
    """

    norm: bool = True
    gate: bool = True
    rope: bool = True
    swiglu: bool = True
    v_view: bool = True
    nvfp4: bool = True
    int8: bool = True
    schedule: bool = True
    allow_eager: bool = False


@functools.cache
def _load(name: str):
    """(public function, Op) of an op."""
    module = importlib.import_module(f"..{HOMES[name][0]}", __package__)
    stem, variant = VARIANTS.get(name, (name, {}))
    return functools.partial(getattr(module, stem), **variant), Op.registry[name]


def stem(name: str) -> str:
    """The op that ``name`` is, or is a variant of."""
    return VARIANTS.get(name, (name,))[0]


def complete(name: str, args: tuple) -> tuple:
    """The op's arguments with what only the running comfy-kitchen knows: the backend whose NVFP4 bytes are stock's."""
    if HOMES[name][1] != "nvfp4":
        return args
    return (*args, importlib.import_module("..nvfp4_quantize", __package__).stock_contract(args[0].device, args[0].dtype))


def run(name: str, *args):
    return _load(name)[0](*args)


def operator(name: str) -> Op:
    return _load(name)[1]


def as_quantized(triple, dtype, shape):
    """comfy-kitchen QuantizedTensor of an NVFP4 triple, as a stock Linear makes it."""
    return importlib.import_module("..nvfp4_quantize", __package__).as_quantized(triple, dtype, shape)


def int8_gemm(pair, weight, weight_scale, dtype):
    """comfy-kitchen's INT8 GEMM on a ready pair."""
    return importlib.import_module("..int8_seam", __package__).linear(pair, weight, weight_scale, dtype)


def int8_gemm_problem(x, columns: int) -> str | None:
    """Why an INT8 Linear of ``columns`` inputs cannot take a ready pair in place of ``x``, or None. The weight's own state is not asked."""
    seam = importlib.import_module("..int8_seam", __package__)
    return seam.unavailable_reason() or seam.call_reason(x, columns)


def any_backend(device) -> str | None:
    """None when some op has a backend besides its reference for this kind of device, else why none has."""
    reasons = []
    for name in HOMES:
        for key, entry in operator(name).backends.items():
            if key == "eager":
                continue
            limits = entry.constraints
            reason = f"needs {' or '.join(sorted(limits.devices))}" if device.type not in limits.devices else limits.available()
            if reason is None:
                return None
            reasons.append(f"{key}: {reason}")
    return "; ".join(dict.fromkeys(reasons)) or "no op has a backend but its reference"


def backend(name: str, features: Features, args) -> tuple[str | None, str | None]:
    """(backend, None) that an automatic call takes, or (None, reason) when the stock call must be made instead."""
    if not getattr(features, HOMES[name][1]):
        return None, "switched off"
    op = operator(name)
    choice = op.choose(*args)
    if choice != "eager" or features.allow_eager:
        return choice, None
    reasons = [f"{other}: {reason}" for other, reason in op.reasons(*args).items() if other != "eager"]
    return None, "; ".join(reasons) or "has no backend but its reference"


def case(name: str, backend: str, args, device) -> str:
    """What a verdict holds for: op, backend, device, dtypes and widths of its arguments, and which optional ones are given."""
    parts = [name, backend, verification.device_name(device)]
    for key, value in zip(operator(name).signature, args, strict=True):
        if hasattr(value, "dtype"):
            shape = "x".join(str(n) for n in value.shape[2 if key == "freqs" else 1 :])
            parts.append(f"{key}:{str(value.dtype).removeprefix('torch.')}[{shape}]")
        elif value is None or isinstance(value, str):
            parts.append(f"{key}:{value or 'none'}")
    return " ".join(parts)

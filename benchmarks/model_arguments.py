"""The arguments of the benchmarks that run H3's model or a part of it, and what is refused before it is built."""

import contextlib
import inspect
import json
from dataclasses import fields

from ..kernels import attention
from ..kernels.patch.comfyui import Features, accelerate
from . import full_size, harness, shapes
from .command_line import saying

SHAPES = f"{', '.join(shapes.JOBS)} or WIDTHxHEIGHTxFRAMES"
WEIGHTS = ",".join(full_size.WEIGHTS)


def switches(values):
    """``values`` when they are switches of :class:`Features`, ``{"rope": False}``. Raises ValueError."""
    known = [field.name for field in fields(Features)]
    wrong = [name for name, value in values.items() if name not in known or not isinstance(value, bool)]
    if wrong:
        raise ValueError(f"features: {', '.join(wrong)}: each is one of {', '.join(known)}, switched on or off")
    return values


def option(text):
    """(KEY, value) of ``KEY=VALUE``, a keyword of ``accelerate`` with a JSON value (a bare word is a string). Raises ValueError."""
    key, equals, value = text.partition("=")
    known = [keyword for keyword in inspect.signature(accelerate).parameters if keyword != "patcher"]
    if key not in known or not equals:
        raise ValueError(f"{text!r} is not KEY=VALUE with one of the keys {', '.join(known)}")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    if key == "features":
        if not isinstance(value, dict):
            raise ValueError(f'{text!r}: features take switches as JSON, such as features={{"rope": false}}')
        switches(value)
    if key == "attention":
        attention.plan(str(value))
    return key, value


def add_device(parser, out="result file (default: benchmarks/results/KIND-DEVICE-DATE.json)"):
    """``--device``, and ``--out`` that is known to be writable before anything is measured."""
    parser.add_argument("--device", type=saying(harness.pick_device), default=harness.pick_device(None),
                        help="cuda or cpu (default: cuda where there is one); cpu checks the harness and measures no speed")  # fmt: skip
    parser.add_argument("--out", type=saying(harness.writable), help=out)


def add_model(parser):
    """The arguments of everything that builds a whole model; parse them with :func:`parse`."""
    add_device(parser)
    parser.add_argument("--model", type=saying(shapes.model), default="h3", help=f"{', '.join(shapes.MODELS)} (default: %(default)s)")
    parser.add_argument("--blocks", type=int, help="use this many of the model's blocks (h3 has 50; default: all, 4 in block)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")


def add_common(parser):
    """The arguments that step, block, trajectory and turbo share."""
    add_model(parser)
    parser.add_argument("--comfyui", help="ComfyUI folder (default: COMFYUI_DIR, then the usual places)")
    parser.add_argument("--option", type=saying(option), action="append", default=[], metavar="KEY=VALUE",
                        help="option for the candidate, passed to accelerate(); may be repeated")  # fmt: skip


def parse(parser, argv, least_blocks=1):
    """The parsed arguments; their ``model`` is cut to ``--blocks``."""
    chosen = parser.parse_args(argv)
    own = chosen.model.blocks
    if chosen.blocks is not None and not least_blocks <= chosen.blocks <= own:
        parser.error(f"argument --blocks: {chosen.blocks}: model {chosen.model.name} has {own} blocks, use {least_blocks} to {own}")
    chosen.model = chosen.model.with_blocks(chosen.blocks)
    return chosen


def require_gpu(chosen):
    """Raises SystemExit for the full-size model on a CPU: it would fill the RAM and run for hours, and measure no speed."""
    if chosen.device.type == "cpu" and chosen.model.name == "h3":
        raise SystemExit("the full-size model needs a GPU; to try the command on a CPU: --model tiny --shape tiny --device cpu")


def require_attention(comfy, chosen):
    """Raises SystemExit when the one attention that was asked for cannot run here."""
    missing = full_size.attention_missing(comfy, chosen.attention, chosen.device)
    if missing:
        raise SystemExit(f"--attention {chosen.attention}: {missing}")

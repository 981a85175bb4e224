"""Measures one op of the pack beside its stock chain: bytes, device time, host time. For ``kernels``, ``check`` and each op's benchmark."""

import functools
import statistics
import time

import torch

from ..kernels import stock
from ..kernels.dispatch import BackendUnavailable, Op, use_backend
from . import command_line, int8_cases, model_arguments, shapes
from .command_line import listed, one_of, positive, saying
from .harness import ceilings, differing, guarded, log, nothing_measured, out_path, repeat, start_result, summary, synchronize

# Token counts: canonical, 864x480x124, two small jobs. A CPU only shows that the harness works.
ROWS = {"cuda": (37_810, 15_499, 4_000, 1_000), "cpu": (64,)}
HOST_ROWS = 64  # so few that the device never is what a loop of launches waits for
TABLES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(op: str, tokens: int, device, **options) -> stock.Case:
    """The :class:`kernels.stock.Case` of any op of the pack at H3's widths."""
    return (int8_cases if op in int8_cases.OPS else stock).make(op, tokens, device, **options)


def stock_problem(case: stock.Case) -> str | None:
    """Why stock's chain cannot run here, in one line, or None."""
    try:
        case.stock(*case.inputs())
    except (RuntimeError, AssertionError, AttributeError) as error:  # kitchen and torch say in their own ways what they lack
        return f"stock cannot run here: {str(error).splitlines()[0]}"
    return None


def backends(op: str, case: stock.Case) -> dict[str, str | None]:
    """For every backend of ``op``: None when it can run ``case`` here, else the reason."""
    found = {}
    for name in Op.registry[op].backends:
        try:
            with use_backend(name):
                case.ours(*case.inputs())
            found[name] = None
        except BackendUnavailable as error:
            found[name] = str(error).removeprefix(f"{op}: backend {name} ")
    return found


def call(function, arguments, backend=None):
    """``function(*arguments)`` as a call without arguments, on ``backend`` when one is named."""
    if backend is None:
        return functools.partial(function, *arguments)

    def run():
        with use_backend(backend):
            return function(*arguments)

    return run


def wrong_elements(case: stock.Case, backend: str) -> int:
    """How many elements differ between ``backend`` and stock on the same inputs."""
    expected = case.stock(*case.inputs())
    got = call(case.ours, case.inputs(), backend)()
    return sum(differing(a, b) for a, b in zip(got, expected, strict=True))


def device_times(case: stock.Case, names, device, reps: int) -> dict[str, dict]:
    """Summaries of milliseconds for ``"stock"`` and each backend, measured in turn and once more in the reverse order."""
    arguments = case.inputs()
    calls = {"stock": call(case.stock, arguments), **{name: call(case.ours, arguments, name) for name in names}}
    times = {name: [] for name in calls}
    for name in [*calls, *reversed(calls)]:
        times[name] += repeat(calls[name], device, reps)
    return {name: summary(values) for name, values in times.items()}


def host_microseconds(function, arguments, device) -> float:
    """Median over batches of the time until ``function`` returned. The automatic choice of backend is part of it."""
    run = call(function, arguments)
    launches, batches = (200, 5) if device.type == "cuda" else (1, 1)
    values = []
    for _ in range(batches + 1):  # the first batch warms up
        synchronize(device)
        start = time.perf_counter()
        for _ in range(launches):
            run()
        values.append((time.perf_counter() - start) / launches * 1e6)
        synchronize(device)
    return statistics.median(values[1:])


def measure(op: str, tokens: int, device, reps: int, **options) -> dict:
    """One row of a result: every backend that runs here beside stock; ``skipped`` says why there is none."""
    case = make(op, tokens, device, **options)
    head = {"op": op, "rows": tokens, **{key: str(value).removeprefix("torch.") for key, value in options.items()}}
    problem = stock_problem(case)
    if problem:
        return {**head, "skipped": problem}
    found = backends(op, case)
    fast = [name for name, reason in found.items() if reason is None and name != "eager"]
    names = fast or ["eager"]
    wrong = {name: wrong_elements(case, name) for name in names}
    times = device_times(case, names, device, reps)
    small = make(op, HOST_ROWS, device, **options)
    return {
        **head, "traffic_bytes": case.traffic, "stock_ms": times.pop("stock"),
        "host_us": {"stock": host_microseconds(small.stock, small.inputs(), device),
                    "ours": host_microseconds(small.ours, small.inputs(), device)},
        "backends": {name: {"ms": times[name], "differing": wrong[name]} for name in names},
        "unavailable": {name: reason for name, reason in found.items() if reason is not None},
    }  # fmt: skip


def describe(row: dict, copy: float, device) -> None:
    """Adds ratios to ``row`` (``copy``: TB/s of a copy in the same run) and prints it."""
    if "skipped" in row:
        log(f"{row['op']:24} {row['rows']:6} skipped: {row['skipped']}")
        return
    for name, entry in row["backends"].items():
        entry["speedup"] = row["stock_ms"]["median"] / entry["ms"]["median"]
        entry["TBs"] = row["traffic_bytes"] / entry["ms"]["median"] / 1e9
        entry["share_of_copy"] = entry["TBs"] / copy
        given = "given" if "tensor_scale" in row else ""
        speed = f"{entry['speedup']:5.2f}x, {entry['share_of_copy']:4.2f} of copy, " if device.type == "cuda" else ""
        log(f"{row['op']:24} {row['rows']:6} {row.get('table_dtype', ''):8} {given:5} {name:7} {entry['ms']['median']:8.3f} ms, "
            f"stock {row['stock_ms']['median']:8.3f} ms, {speed}{entry['differing']} differ; "
            f"host {row['host_us']['ours']:5.1f} us, stock {row['host_us']['stock']:5.1f} us")


def configurations(op: str) -> list[dict]:
    """The options of :func:`make` under which an op is measured: both kinds of AdaLN table where it reads one, and for the NVFP4 ops
    the tensor scale computed or given. ``nvfp4_quantize`` stands at the attention output."""
    tables = [{}] if op.startswith(("swiglu", "quantize", "qk_", "nvfp4_")) else [{"table_dtype": dtype} for dtype in TABLES.values()]
    if op not in stock.NVFP4_OPS:
        return tables
    width = {"width": 7168} if op == "nvfp4_quantize" else {}
    return [{**width, **table, **given} for table in tables for given in ({}, {"tensor_scale": 0.0015})]


def bench(kind: str, ops, argv, description) -> int:
    """``main`` of a benchmark of ``ops``; the exit code is 1 when a byte differs from stock, or nothing was measured."""
    parser = command_line.parser(kind, description)
    model_arguments.add_device(parser)
    parser.add_argument("--ops", type=listed(one_of("op", ops)), default=list(ops), help="names, comma separated (default: all)")
    parser.add_argument("--rows", type=listed(positive),
                        help=f"token counts (default: {','.join(map(str, ROWS['cuda']))}; on a CPU {ROWS['cpu'][0]})")  # fmt: skip
    parser.add_argument("--reps", type=saying(positive), default=20, help="timed calls per pass; every case gets two passes (default: 20)")
    args = parser.parse_args(argv)
    device = args.device
    torch.manual_seed(0)
    as_comfyui()
    result = start_result(kind, device, argv)
    failed = False
    with guarded(result, out_path(args.out, kind, device)):
        result["ceilings"] = ceilings(device, 37_810 if device.type == "cuda" else 64, shapes.model("h3").hidden)
        for op in args.ops:
            for options in configurations(op):
                for tokens in args.rows or ROWS[device.type]:
                    row = measure(op, tokens, device, args.reps, **options)
                    describe(row, result["ceilings"]["copy_rows_TBs"], device)
                    result["rows"].append(row)
                    failed |= any(entry["differing"] for entry in row.get("backends", {}).values())
    return int(failed or nothing_measured(result))


def as_comfyui() -> None:
    """comfy-kitchen's backends as ComfyUI sets them: no Triton; CUDA only on a CUDA 13 torch."""
    import comfy_kitchen

    comfy_kitchen.registry.disable("triton")
    if torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) < 13:
        comfy_kitchen.registry.disable("cuda")

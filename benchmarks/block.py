"""Device time of one transformer block by group, stock and candidate, from torch's profiler.

A forward of a few full-width blocks is profiled. One block's worth of work is what is launched between the RoPE kernels of two
neighbouring blocks: every candidate launches exactly one a block, and the count stays true when one fuses across a block's border.
Kernels are sorted into groups by the torch operator that launched them, its argument shapes and the kernel's name; nothing in the
model is wrapped or replaced.
"""

import json
import re
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import _comfy, candidates, command_line, full_size, harness, machine, model_arguments, shapes
from .command_line import listed, one_of, positive, saying

# A product's own name may speak of the quantised types it takes or gives back.
MULTIPLIES = re.compile(r"gemm|cutlass|nvjet|xmma|dequant", re.I)
QUANTISES = re.compile(r"quant|rotate|hadamard|absmax|convrot", re.I)
ATTENDS = re.compile(r"attn|attention|fmha|flash_fwd|sdpa|scaled_dot_product", re.I)
# Operators of this pack and the group their kernels count into.
OURS = {
    "modulate": "modulation",
    "gate": "gate",
    "norm_modulate": "norm + modulation",
    "gate_norm_modulate": "gate + norm + modulation",
    "qk_norm_rope": "rope",
    "swiglu": "activation",
    "quantize_rotate_int8": "quantise",
    "swiglu_int8": "activation + quantise",
    "norm_modulate_int8": "norm + modulation + quantise",
    "gate_norm_modulate_int8": "gate + norm + modulation + quantise",
}
# Products launched without a torch operator, in the order in which they follow a block's RoPE: four where this pack hands INT8
# pairs to comfy-kitchen's GEMM, one where stock calls it (fc2, which takes the activation along).
BARE_PRODUCTS = {4: ("out_proj", "fc1", "fc2", "qkv"), 1: ("fc2",)}
BARE = "product without an operator"


@dataclass
class Operator:
    """A torch operator on the CPU side of the trace. dims: shapes of its arguments."""

    name: str
    start: float
    end: float
    thread: object
    dims: list = field(default_factory=list)


@dataclass
class Kernel:
    """One kernel, copy or fill. us: device time. at, thread: when and where it was launched."""

    name: str
    us: float
    at: float
    thread: object


def gemm_of(operator, model):
    """Which of the block's Linears an operator is, from its arguments' shapes; None when it is none of them.

    It must get the weight and an activation of the matching width (twice that for a Linear that takes [gate | up] and
    activates it itself): a cast or a copy of the weight is no product.
    """
    for name, (out, into) in model.gemms().items():
        weight = [[out, into], [into, out]]
        others = [shape for shape in operator.dims if len(shape) >= 2 and shape not in weight]
        if any(shape in weight for shape in operator.dims) and any(shape[-1] in (into, 2 * into) for shape in others):
            return name
    return None


def classify(chain, kernel, model):
    """Group of a kernel. chain: the operators around its launch, outermost first (empty for a bare launch, as Triton's)."""
    names = [operator.name for operator in chain]
    ours = [name.split("::")[1] for name in names if name.startswith("h3_vortex::")]
    if ours and ours[-1] != "int8_linear":  # that one is a product, and its weight says which
        return OURS.get(ours[-1], f"h3_vortex: {ours[-1]}")
    gemm = next((gemm for gemm in (gemm_of(operator, model) for operator in chain) if gemm), None)
    if gemm:
        if MULTIPLIES.search(kernel) or not QUANTISES.search(kernel):
            return f"{gemm} GEMM"
        # fc2's quantiser takes [gate | up] when the activation rides along.
        folded = gemm == "fc2" and any(shape and shape[-1] == 2 * model.ffn for op in chain for shape in op.dims)
        return "activation + quantise" if folded else "quantise"
    if not chain and kernel in OURS:
        return OURS[kernel]
    text = " ".join(names)
    if "rope" in text or "rope" in kernel:
        return "rope"
    if ATTENDS.search(kernel):  # an attention kernel's name may speak of the quantised types it takes
        return "attention"
    if ATTENDS.search(text) or re.search(r"quant_per_block|quant_qk|quant_v|k_anchor", kernel):
        return "attention: quantise" if QUANTISES.search(kernel) or "k_anchor" in kernel else "attention"
    if "rms_norm" in text or "rms_norm" in kernel.lower():
        return "norm"
    if not chain and (MULTIPLIES.search(kernel) or QUANTISES.search(kernel)):
        # comfy-kitchen's INT8 Linear launches without a torch operator; ComfyUI calls it like that for fc2 alone.
        return BARE if MULTIPLIES.search(kernel) else "activation + quantise"
    widths = {shape[-1] for operator in chain for shape in operator.dims if shape}
    tall = max((shape[0] for operator in chain for shape in operator.dims if len(shape) == 2), default=0)
    if 6 * 3 * model.hidden in widths or any([6 * 3 * model.hidden, model.curve[1]] in op.dims for op in chain):
        return "adaln"
    if "aten::addcmul_" in names:
        return "gate"
    if ("aten::mul_" in names or "aten::add_" in names) and model.hidden in widths and tall > 1:
        return "modulation"
    if "aten::silu" in names or (names and names[0] in ("aten::mul", "aten::mul_") and model.ffn in widths):
        return "activation"
    if any(name in ("aten::clone", "aten::contiguous", "aten::reshape") for name in names):
        return "copies"
    return "other"


def read_trace(events, device_type):
    """(operators, kernels) of a chrome trace's ``traceEvents``. On a CPU the outermost operators stand in for kernels."""
    operators, launches, device = [], {}, []
    for event in events:
        category, extra = event.get("cat"), event.get("args", {})
        if category == "cpu_op":
            # An argument that is a list of tensors has a list of shapes; it names no weight, so it is left out.
            dims = [shape for shape in extra.get("Input Dims", []) if all(isinstance(size, int) for size in shape)]
            start = float(event["ts"])
            operators.append(Operator(event["name"], start, start + float(event["dur"]), event["tid"], dims))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in extra:
            launches[extra["correlation"]] = (float(event["ts"]), event["tid"])
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(event)
    operators.sort(key=lambda operator: (operator.start, -operator.end))
    if device_type != "cuda":
        return operators, [Kernel(op.name, op.end - op.start, op.start, op.thread) for op in outermost(operators)]
    kernels, orphans = [], 0
    for event in device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None:
            orphans += 1
        else:
            kernels.append(Kernel(event["name"], float(event["dur"]), *launch))
    if orphans > 0.02 * len(device):
        raise RuntimeError(f"{orphans} of {len(device)} kernels have no launch in the trace: the groups would be wrong")
    return operators, sorted(kernels, key=lambda kernel: kernel.at)


def outermost(operators):
    """The operators that no other operator of their thread encloses. ``operators`` must be sorted by start."""
    ends, found = {}, []
    for operator in operators:
        if operator.start >= ends.get(operator.thread, float("-inf")):
            found.append(operator)
            ends[operator.thread] = operator.end
    return found


def blocks_of(operators, kernels, model):
    """[[(group, kernel)]]: one list per block's worth of work, from one RoPE kernel to the next."""
    starts = [kernel.at for kernel in kernels if "rope" in kernel.name.lower()]
    windows = []
    for begin, end in zip(starts, starts[1:], strict=False):
        inside = [operator for operator in operators if operator.start < end and operator.end > begin]
        window = []
        for kernel in kernels:
            if begin <= kernel.at < end:
                chain = [
                    op for op in inside if op.thread == kernel.thread and op.start <= kernel.at <= op.end
                ]
                window.append((classify(chain, kernel.name, model), kernel))
        windows.append(named_products(window))
    return windows


def named_products(window):
    """``window`` with its products that no operator launched named by their order."""
    count = sum(group == BARE for group, _ in window)
    order = iter(BARE_PRODUCTS.get(count, (BARE,) * count))
    return [(f"{next(order)} GEMM" if group == BARE else group, kernel) for group, kernel in window]


def tabulate(windows):
    """({group: ms}, [{group, name, ms, launches}]), medians over the windows, the largest first."""
    if not windows:
        raise RuntimeError("no two neighbouring RoPE kernels in the trace: the model needs at least two blocks")
    groups, kernels = {}, {}
    for index, window in enumerate(windows):
        for group, kernel in window:
            groups.setdefault(group, [0.0] * len(windows))[index] += kernel.us / 1e3
            times, counts = kernels.setdefault((group, kernel.name), ([0.0] * len(windows), [0] * len(windows)))
            times[index] += kernel.us / 1e3
            counts[index] += 1
    table = [
        {"group": group, "name": name[:200], "ms": round(statistics.median(times), 5),
         "launches": statistics.median(counts)}
        for (group, name), (times, counts) in kernels.items()
    ]  # fmt: skip
    medians = {group: round(statistics.median(times), 5) for group, times in groups.items()}
    ordered = dict(sorted(medians.items(), key=lambda item: -item[1]))
    return ordered, sorted(table, key=lambda row: -row["ms"])


def profile(comfy, patcher, inputs, attention, model, device, rounds):
    """({group: ms}, kernel table) of one block of ``patcher``, from ``rounds`` profiled forwards."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    windows = []
    with full_size.session(comfy, patcher, inputs, attention) as step, tempfile.TemporaryDirectory() as folder:
        step()
        harness.synchronize(device)
        for index in range(rounds):
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                step()
                harness.synchronize(device)
            trace = Path(folder) / f"{index}.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            # The first window still holds what follows the first block's start-up; with two blocks it is all there is.
            found = blocks_of(*read_trace(events, device.type), model)
            windows += found[1:] or found
    return tabulate(windows)


def arguments(argv):
    parser = command_line.parser("block", __doc__)
    model_arguments.add_common(parser)
    parser.add_argument("--weights", type=listed(one_of("weights", full_size.WEIGHTS)), default="bf16",
                        help=f"{model_arguments.WEIGHTS} (default: bf16)")  # fmt: skip
    parser.add_argument("--attention", type=listed(one_of("attention", full_size.ATTENTIONS)), default="fa2",
                        help=f"{','.join(full_size.ATTENTIONS)} (default: fa2)")  # fmt: skip
    parser.add_argument("--shape", type=saying(shapes.job), default="canonical", help=f"{model_arguments.SHAPES} (default: canonical)")
    parser.add_argument("--candidates", type=listed(one_of("candidate", candidates.CANDIDATES)), default="stock,exact",
                        help=f"{','.join(candidates.CANDIDATES)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=saying(positive), default=3, help="profiled forwards (default: 3)")
    parser.add_argument("--kernels", type=saying(positive), default=60, help="kernels kept per row of the result (default: 60)")
    # A block's worth of work is read between two RoPE kernels, so it takes two blocks; more than four say nothing new.
    chosen = model_arguments.parse(parser, argv, least_blocks=2)
    if chosen.blocks is None:
        chosen.model = chosen.model.with_blocks(min(4, chosen.model.blocks))
    return chosen


def run(chosen, argv):
    device, model, job = chosen.device, chosen.model, chosen.shape
    model_arguments.require_gpu(chosen)
    comfy = _comfy.load(device, chosen.comfyui)
    harness.log(f"ComfyUI {comfy.version} imported; device {device}")
    result = harness.start_result("block", device, argv, comfy.version)
    path = harness.out_path(chosen.out, "block", device)
    with harness.guarded(result, path), torch.inference_mode(), machine.PowerLog(device, result):
        result["ceilings"] = harness.ceilings(device, job.rows, model.hidden)
        _comfy.first_sdpa_call(comfy, device)
        for weights in chosen.weights:
            patcher = full_size.build(comfy, model, weights, device, chosen.seed)
            inputs = full_size.make_inputs(comfy, patcher, job, device)
            harness.log(f"built {model.blocks} blocks of {model.name} in {weights}, {job.rows} rows")
            for attention in chosen.attention:
                row = {"model": model.name, "blocks": model.blocks, "weights": weights, "shape": job.name,
                       "rows": job.rows, "attention": attention}  # fmt: skip
                missing = full_size.attention_missing(comfy, attention, device)
                if missing:
                    harness.log("skipped:", weights, attention, missing)
                    result["rows"].append({**row, "candidate": None, "skipped": missing})
                    continue
                row["compute_dtype"] = str(patcher.model.get_dtype_inference()).removeprefix("torch.")
                row["attention_function"] = full_size.attention_name(comfy, attention, device)
                base = full_size.with_attention(comfy, patcher, attention)
                for name in chosen.candidates:
                    candidate = candidates.make(name, base, dict(chosen.option))
                    with _comfy.ErrorLog() as errors:
                        groups, kernels = profile(comfy, candidate, inputs, attention, model, device, chosen.rounds)
                    total, account = sum(groups.values()), candidates.report(name, candidate)
                    result["rows"].append({
                        **row, "candidate": name, "groups_ms": groups, "sum_ms": round(total, 5),
                        "kernels": kernels[: chosen.kernels], "profiled_rounds": chosen.rounds,
                        "report": account, "dispatch": candidates.dispatch(account), "errors": errors.messages,
                    })  # fmt: skip
                    harness.log(f"{weights} {attention} {name}: {total:.3f} ms a block",
                                {group: round(ms, 3) for group, ms in groups.items()})  # fmt: skip
            patcher = base = candidate = inputs = None
            full_size.release()
    if harness.nothing_measured(result):
        return 1
    idle = candidates.idle(result["rows"], device)
    for row in idle:
        print(f"NOTHING WAS FUSED: {row['weights']} {row['attention']} {row['candidate']}")
    return 1 if idle else 0


def main(argv):
    return run(arguments(argv), argv)

"""Whole denoiser steps of ComfyUI's full-size MiniMax H3, stock and candidate in turn: time, memory and equal bytes."""

import json
import statistics

import torch

from . import _comfy, candidates, command_line, full_size, harness, machine, model_arguments, shapes
from .command_line import listed, one_of, positive, saying

# Share of the measured BF16 matmul rate that each attention reached on an H200 (37,810 rows), and what INT8 Linears
# cost there against BF16 ones. For the printed time plan alone; nothing measured depends on them.
PLAN_ATTENTION = {"fa2": 0.44, "cudnn": 0.70, "kitchen": 0.57, "sage": 0.53}
PLAN_BANDWIDTH = 0.42  # stock's elementwise kernels against a plain copy
TOO_LARGE = "out of GPU memory: --weights int8 takes half of bf16, --shape 864x480x124 less beside them, --blocks N cuts the model"
PLAN_BUILD_S = {"bf16": 10, "int8": 15, "nvfp4": 15}


def pair(text):
    """(weights, attention) of ``WEIGHTS:ATTENTION``. Raises ValueError."""
    weights, colon, attention = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is not WEIGHTS:ATTENTION, such as int8:kitchen")
    return one_of("weights", full_size.WEIGHTS)(weights), one_of("attention", full_size.ATTENTIONS)(attention)


def arguments(argv):
    parser = command_line.parser("step", __doc__)
    model_arguments.add_common(parser)
    parser.add_argument("--weights", type=listed(one_of("weights", full_size.WEIGHTS)),
                        help=f"{model_arguments.WEIGHTS} (default: bf16)")  # fmt: skip
    parser.add_argument("--attention", type=listed(one_of("attention", full_size.ATTENTIONS)),
                        help=f"{','.join(full_size.ATTENTIONS)}; fa2 is ComfyUI's default (default: fa2)")  # fmt: skip
    parser.add_argument("--only", type=listed(pair), help="WEIGHTS:ATTENTION pairs, such as int8:kitchen, in place of all combinations")
    parser.add_argument("--shape", type=listed(shapes.job), default="canonical",
                        help=f"{model_arguments.SHAPES} (default: canonical)")  # fmt: skip
    parser.add_argument("--candidates", type=listed(one_of("candidate", candidates.CANDIDATES)), default="stock,exact",
                        help=f"{','.join(candidates.CANDIDATES)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--reps", type=saying(positive), default=3, help="timed rounds (default: 3)")
    parser.add_argument("--warmup", type=saying(positive), default=1, help="untimed calls before the rounds; the first is reported")
    parser.add_argument("--deadline", type=float, help="skip what would not finish within this many seconds from start")
    parser.add_argument("--plan", action="store_true", help="print what would run and the estimated time on an H200, and stop")
    parser.add_argument("--keep-going", action="store_true", help="exit 0 although bytes differ or nothing was fused")
    chosen = model_arguments.parse(parser, argv)
    if chosen.only and (chosen.weights or chosen.attention):
        parser.error("--only names pairs of weights and attention: leave out --weights and --attention")
    chosen.pairs = chosen.only or [(w, a) for w in chosen.weights or ["bf16"] for a in chosen.attention or ["fa2"]]
    return chosen


def configurations(chosen):
    """[(weights, job, attention)], one model built at a time, the smaller jobs of a model after the larger ones."""
    jobs = sorted(chosen.shape, key=lambda job: -job.rows)
    order = sorted({weights for weights, _ in chosen.pairs}, key=full_size.WEIGHTS.index)
    return [(w, job, a) for w in order for job in jobs for weights, a in chosen.pairs if weights == w]


def estimate_step_s(model, job, attention, matmul_TFLOPs, copy_TBs):
    """Seconds that one stock step should take on a GPU with these ceilings. For the plan only."""
    matrix, scores = shapes.step_flops(model, job)
    compute = matrix / matmul_TFLOPs + scores / (matmul_TFLOPs * PLAN_ATTENTION[attention])
    return compute / 1e12 + shapes.elementwise_bytes(model, job) / (copy_TBs * PLAN_BANDWIDTH) / 1e12


def make_plan(chosen, model, matmul_TFLOPs, copy_TBs):
    """[{weights, shape, rows, attention, calls, estimated_s}] and the sum in seconds with the model builds."""
    calls = len(chosen.candidates) * (chosen.warmup + chosen.reps)
    entries = []
    for weights, job, attention in configurations(chosen):
        seconds = calls * estimate_step_s(model, job, attention, matmul_TFLOPs, copy_TBs)
        entries.append({"weights": weights, "shape": job.name, "rows": job.rows, "attention": attention, "calls": calls,
                        "estimated_s": round(seconds, 1)})  # fmt: skip
    build = sum(PLAN_BUILD_S[weights] for weights in {entry["weights"] for entry in entries})
    return entries, round(sum(entry["estimated_s"] for entry in entries) + build, 1)


def measure_configuration(comfy, patcher, inputs, attention, chosen, device):
    """Rows (one per candidate) of one model, job and attention; see ``result.schema.json`` for the fields."""
    base = full_size.with_attention(comfy, patcher, attention)
    rows, hashes, patchers, cases = {}, {}, {}, {}
    with _comfy.ErrorLog() as errors:
        for name in chosen.candidates:
            patchers[name] = candidates.make(name, base, dict(chosen.option))
            cases[name] = lambda name=name: full_size.session(comfy, patchers[name], inputs, attention)
            first = []
            for _ in range(chosen.warmup):
                with cases[name]() as step:
                    value, sample = harness.measure(step, device)
                first.append(sample.ms)
            hashes[name] = [harness.sha256(value)]
            finite = all(bool(torch.isfinite(tensor).all()) for tensor in value)
            spread = [round(float(tensor.float().std()), 6) for tensor in value]
            del value
            rows[name] = {"candidate": name, "first_call_ms": round(first[0], 3), "finite": finite, "std": spread}
            harness.log(f"  {name}: first call {first[0]:.1f} ms, finite {finite}, std {spread}")
        samples = harness.alternate(
            cases, chosen.reps, device, lambda name, rep, value: hashes[name].append(harness.sha256(value))
        )
    stock = samples.get("stock")
    for name, row in rows.items():
        row["ms"] = harness.summary([sample.ms for sample in samples[name]])
        row["host_ms"] = harness.summary([sample.host_ms for sample in samples[name]])
        row["resident_bytes"] = max(sample.resident_bytes for sample in samples[name])
        row["peak_bytes"] = max(sample.peak_bytes for sample in samples[name])
        row["sha256"] = hashes[name][0]
        row["repeatable"] = len(set(hashes[name])) == 1
        row["equal_to_stock"] = None if stock is None else set(hashes[name]) == {hashes["stock"][0]}
        row["speedup"] = None
        if stock is not None:
            # Rounds are neighbours in time, so their ratio does not see the clock drift of a long run.
            ratios = [a.ms / b.ms for a, b in zip(stock, samples[name], strict=True)]
            row["speedup"] = {"of_medians": statistics.median(s.ms for s in stock) / row["ms"]["median"],
                              "per_round": harness.summary(ratios)}  # fmt: skip
        row["report"] = candidates.report(name, patchers[name])
        row["dispatch"] = candidates.dispatch(row["report"])
        row["errors"] = errors.messages
    return list(rows.values())


def run(chosen, argv):
    device, model = chosen.device, chosen.model
    todo = configurations(chosen)
    if chosen.plan:
        entries, total = make_plan(chosen, model, 770.0, 3.8)
        plan = {"assuming": "H200", "plan": entries, "estimated_s": total}
        if model.name != "h3":  # launches decide there, which the estimate does not know
            plan = {"plan": [{key: value for key, value in entry.items() if key != "estimated_s"} for entry in entries]}
        print(json.dumps(plan, indent=1))
        return 0
    model_arguments.require_gpu(chosen)
    comfy = _comfy.load(device, chosen.comfyui)
    harness.log(f"ComfyUI {comfy.version} imported; device {device}")
    result = harness.start_result("step", device, argv, comfy.version)
    path = harness.out_path(chosen.out, "step", device)
    with harness.guarded(result, path), torch.inference_mode(), machine.PowerLog(device, result):
        result["ceilings"] = harness.ceilings(device, max(job.rows for _, job, _ in todo), model.hidden)
        harness.log("ceilings", {k: round(v, 3) for k, v in result["ceilings"].items() if isinstance(v, float)})
        rates = result["ceilings"]["matmul_bf16_TFLOPs"], result["ceilings"]["copy_TBs"]
        entries, total = make_plan(chosen, model, *rates)
        result["plan"] = {"entries": entries, "estimated_s": total}
        for entry in entries:
            harness.log("plan:", *entry.values())
        harness.log(f"plan: {total:.0f} s estimated with the builds")
        _comfy.first_sdpa_call(comfy, device)
        patcher, built = None, None
        for at, (weights, job, attention) in enumerate(todo):
            row = {"model": model.name, "blocks": model.blocks, "weights": weights, "shape": job.name, "rows": job.rows,
                   "attention": attention}  # fmt: skip
            missing = full_size.attention_missing(comfy, attention, device)
            if chosen.deadline and harness.elapsed() + 1.15 * entries[at]["estimated_s"] > chosen.deadline:
                missing = f"would not finish before the deadline of {chosen.deadline:.0f} s"
            if missing:
                harness.log("skipped:", weights, job.name, attention, missing)
                result["rows"].append({**row, "candidate": None, "skipped": missing})
                continue
            measured = []
            try:
                if built != weights:
                    patcher = inputs = built = None
                    full_size.release()
                    patcher, built = full_size.build(comfy, model, weights, device, chosen.seed), weights
                    harness.log(f"built {model.blocks} blocks of {model.name} in {weights}")
                row["compute_dtype"] = str(patcher.model.get_dtype_inference()).removeprefix("torch.")
                row["attention_function"] = full_size.attention_name(comfy, attention, device)
                harness.log(f"{weights} {job.name} ({job.rows} rows) {attention} = {row['attention_function']}, {row['compute_dtype']}")
                inputs = full_size.make_inputs(comfy, patcher, job, device)
                measured = measure_configuration(comfy, patcher, inputs, attention, chosen, device)
            except torch.cuda.OutOfMemoryError:
                patcher = inputs = built = None
            if not measured:
                full_size.release()
                harness.log("skipped:", weights, job.name, attention, TOO_LARGE)
                result["rows"].append({**row, "candidate": None, "skipped": TOO_LARGE})
            result["rows"] += [{**row, **entry} for entry in measured]
            for entry in measured:
                harness.log("  " + describe(entry, device))
            harness.write_result(result, path)
    wrong = [row for row in result["rows"] if row.get("equal_to_stock") is False and row["candidate"] in candidates.KEEPS_BYTES]
    idle = candidates.idle(result["rows"], device)
    if harness.nothing_measured(result):
        return 1
    for text, rows in (("BYTES DIFFER FROM STOCK", wrong), ("NOTHING WAS FUSED", idle)):
        for row in rows:
            print(f"{text}: {row['weights']} {row['shape']} {row['attention']} {row['candidate']}")
    return 1 if (wrong or idle) and not chosen.keep_going else 0


def describe(row, device):
    """One line of the printed table."""
    speed = f", {row['speedup']['of_medians']:.4f} x stock" if row["speedup"] and device.type == "cuda" else ""
    return (
        f"{row['candidate']}: {row['ms']['median']:.1f} ms ({row['ms']['min']:.1f}-{row['ms']['max']:.1f}){speed}, "
        f"peak +{row['peak_bytes'] / 1e9:.2f} GB on {row['resident_bytes'] / 1e9:.2f}, "
        f"equal to stock {row['equal_to_stock']}, repeatable {row['repeatable']}, {row['sha256'][:12]}"
        + (f", {row['dispatch']}" if row["dispatch"] else "")
    )


def main(argv):
    return run(arguments(argv), argv)

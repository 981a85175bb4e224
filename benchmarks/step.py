"""Whole denoiser steps of ComfyUI's full-size MiniMax H3, stock and candidate in turn: time, memory and equal bytes."""

import argparse
import json
import statistics

import torch

from . import _comfy, candidates, full_size, harness, shapes

# Share of the measured BF16 matmul rate that each attention reached on an H200 (37,810 rows), and what INT8 Linears
# cost there against BF16 ones. For the printed time plan alone; nothing measured depends on them.
PLAN_ATTENTION = {"fa2": 0.44, "cudnn": 0.70, "kitchen": 0.57, "sage": 0.53}
PLAN_BANDWIDTH = 0.42  # stock's elementwise kernels against a plain copy
TOO_LARGE = "out of GPU memory: --weights int8 takes half of bf16, --shape 864x480x124 less beside them, --blocks N cuts the model"
PLAN_BUILD_S = {"bf16": 10, "int8": 15, "nvfp4": 15}


def words(text):
    return [word for word in text.split(",") if word]


def option(text):
    """``KEY=VALUE`` with a JSON value (a bare word is a string)."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def add_common(parser):
    """The arguments that step, block and trajectory share."""
    parser.add_argument("--model", default="h3", help=f"{', '.join(shapes.MODELS)} (default: %(default)s)")
    parser.add_argument("--blocks", type=int, help="use this many blocks instead of the model's own number")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--comfyui", help="ComfyUI folder (default: COMFYUI_DIR, then the usual places)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="KEY=VALUE",
                        help="option for the candidate, passed to accelerate(); may be repeated")  # fmt: skip
    parser.add_argument("--out", help="result file (default: benchmarks/results/KIND-DEVICE-DATE.json)")


def arguments(argv):
    parser = argparse.ArgumentParser(prog="python benchmarks step", description=__doc__)
    add_common(parser)
    parser.add_argument("--weights", type=words, default=["bf16"], help="bf16,int8,nvfp4 (default: bf16)")
    parser.add_argument("--attention", type=words, default=["fa2"],
                        help=f"{','.join(full_size.ATTENTIONS)}; fa2 is ComfyUI's default (default: fa2)")  # fmt: skip
    parser.add_argument("--only", type=words, help="WEIGHTS:ATTENTION pairs to run instead of all combinations")
    parser.add_argument("--shape", type=words, default=["canonical"],
                        help=f"{','.join(shapes.JOBS)} or WxHxFRAMES (default: canonical)")  # fmt: skip
    parser.add_argument("--candidates", type=words, default=["stock", "exact"], help="(default: stock,exact)")
    parser.add_argument("--reps", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--warmup", type=int, default=1, help="untimed calls before the rounds; the first is reported")
    parser.add_argument("--deadline", type=float, help="skip what would not finish within this many seconds from start")
    parser.add_argument("--plan", action="store_true", help="print what would run and the estimated time, and stop")
    parser.add_argument("--keep-going", action="store_true", help="exit 0 although bytes differ or nothing was fused")
    chosen = parser.parse_args(argv)
    if chosen.reps < 1 or chosen.warmup < 1:
        parser.error("--reps and --warmup must be at least 1 (the first call of a process is never a measurement)")
    for name in chosen.candidates:
        if name not in candidates.CANDIDATES:
            parser.error(f"unknown candidate {name!r}: use {','.join(candidates.CANDIDATES)}")
    return chosen


def configurations(chosen):
    """[(weights, job, attention)], one model built at a time, the smaller jobs of a model after the larger ones."""
    if chosen.only:
        pairs = [tuple(pair.split(":")) for pair in chosen.only]
    else:
        pairs = [(weights, attention) for weights in chosen.weights for attention in chosen.attention]
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in full_size.WEIGHTS or pair[1] not in full_size.ATTENTIONS:
            raise SystemExit(f"{':'.join(pair)}: not WEIGHTS:ATTENTION of {full_size.WEIGHTS} and {full_size.ATTENTIONS}")
    jobs = sorted((shapes.job(name) for name in chosen.shape), key=lambda job: -job.rows)
    order = sorted({weights for weights, _ in pairs}, key=full_size.WEIGHTS.index)
    return [(w, job, a) for w in order for job in jobs for weights, a in pairs if weights == w]


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
    device = harness.pick_device(chosen.device)
    model = shapes.model(chosen.model).with_blocks(chosen.blocks)
    todo = configurations(chosen)
    if chosen.plan:
        entries, total = make_plan(chosen, model, 770.0, 3.8)
        print(json.dumps({"assuming": "H200", "plan": entries, "estimated_s": total}, indent=1))
        return 0
    if device.type == "cpu" and model.name == "h3":
        raise SystemExit("the full-size model needs a GPU; to try the command on a CPU: --model tiny --shape tiny --device cpu")
    comfy = _comfy.load(device, chosen.comfyui)
    harness.log(f"ComfyUI {comfy.version} imported; device {device}")
    result = harness.start_result("step", device, argv, comfy.version)
    path = harness.out_path(chosen.out, "step", device)
    with harness.guarded(result, path), torch.inference_mode(), harness.PowerLog(device, result):
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
                harness.log("  " + describe(entry))
            harness.write_result(result, path)
    wrong = [row for row in result["rows"] if row.get("equal_to_stock") is False and row["candidate"] in candidates.KEEPS_BYTES]
    # On a CPU nothing can be fused; on a GPU a candidate that fused nothing was not measured.
    idle = [row for row in result["rows"] if device.type == "cuda" and row["candidate"] != "fastest" and candidates.stood_by(row)]
    if not any("ms" in row for row in result["rows"]):
        print("NOTHING WAS MEASURED: the rows say why")
        return 1
    for text, rows in (("BYTES DIFFER FROM STOCK", wrong), ("NOTHING WAS FUSED", idle)):
        for row in rows:
            print(f"{text}: {row['weights']} {row['shape']} {row['attention']} {row['candidate']}")
    return 1 if (wrong or idle) and not chosen.keep_going else 0


def describe(row):
    """One line of the printed table."""
    speed = f", {row['speedup']['of_medians']:.4f} x stock" if row["speedup"] else ""
    return (
        f"{row['candidate']}: {row['ms']['median']:.1f} ms ({row['ms']['min']:.1f}-{row['ms']['max']:.1f}){speed}, "
        f"peak +{row['peak_bytes'] / 1e9:.2f} GB on {row['resident_bytes'] / 1e9:.2f}, "
        f"equal to stock {row['equal_to_stock']}, repeatable {row['repeatable']}, {row['sha256'][:12]}"
        + (f", {row['dispatch']}" if row["dispatch"] else "")
    )


def main(argv):
    return run(arguments(argv), argv)

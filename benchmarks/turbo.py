"""What a Turbo LoRA costs: whole steps of ComfyUI's full-size H3 with a random 208-module LoRA beside its layers, and without it.

Four patchers of one model in turn: stock, this pack, the LoRA alone, and both. ``overhead``: with / without - 1, the median over rounds.
The bytes of the LoRA alone and of LoRA and pack together must be equal.
"""

import json

import torch

from ..h3.turbo import Adapter
from ..kernels.patch import side_path
from . import _comfy, candidates, command_line, full_size, harness, machine, model_arguments, shapes
from .command_line import listed, one_of, positive, saying

RANK, SCALE = 128, 0.0625  # of the published 8-step file
PAIRS = {"turbo": "stock", "turbo+exact": "exact"}  # with the LoRA -> what it is compared with
LIMIT = 0.06


def random_lora(model, device, rank=RANK, seed=0):
    """``{layer: Adapter}`` like a published Turbo file: four layers of every block and refiner block, q/k/v in three groups, BF16."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(rows, columns, std):
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)

    names = {"qkv": "attn.qkv_proj", "out_proj": "attn.out_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    lora = {}
    for prefix, count in (("blocks", model.blocks), ("token_refiner.blocks", model.refiner_blocks)):
        for index in range(count):
            for short, (out, into) in model.gemms().items():
                groups = 3 if short == "qkv" else 1
                spans = tuple((j * out // groups, (j + 1) * out // groups) for j in range(groups))
                lora[f"{prefix}.{index}.{names[short]}"] = Adapter(
                    draw(groups * rank, into, into**-0.5), draw(out, rank, 0.02), spans, (SCALE,) * groups)  # fmt: skip
    return lora


def make_patchers(base, lora, options):
    """``{candidate: patcher}``; ``options`` as :func:`candidates.exact` takes them."""
    return {
        "stock": base, "exact": candidates.exact(base, options), "turbo": side_path.attach(base, lora, 1.0),
        "turbo+exact": candidates.exact(side_path.attach(base, lora, 1.0), options),
    }  # fmt: skip


def measure(comfy, patchers, inputs, attention, reps, device):
    """One row per candidate: times, memory, hash, overhead over its pair, and the pack's own account."""
    hashes, first = {}, {}

    def case(name):
        def make():
            lent = [*patchers[name].get_nested_additional_models()]
            comfy.model_management.load_models_gpu([patchers[name], *lent], force_full_load=True)
            return full_size.session(comfy, patchers[name], inputs, attention)

        return make

    cases = {name: case(name) for name in patchers}
    for name in patchers:
        with cases[name]() as step:
            value, sample = harness.measure(step, device)
        first[name], hashes[name] = sample.ms, {harness.sha256(value)}
        harness.log(f"  {name}: first call {sample.ms:.1f} ms, finite {all(bool(torch.isfinite(t).all()) for t in value)}")
        del value
    samples = harness.alternate(cases, reps, device, lambda name, rep, value: hashes[name].add(harness.sha256(value)))
    rows = []
    for name, patcher in patchers.items():
        account = candidates.exact_report(patcher) if name.endswith("exact") else None
        row = {
            "candidate": name, "first_call_ms": round(first[name], 3), "ms": harness.summary([s.ms for s in samples[name]]),
            "peak_bytes": max(s.peak_bytes for s in samples[name]), "resident_bytes": max(s.resident_bytes for s in samples[name]),
            "sha256": sorted(hashes[name])[0], "repeatable": len(hashes[name]) == 1, "overhead": None, "report": account,
            "dispatch": candidates.dispatch(account),
        }  # fmt: skip
        if name in PAIRS:
            ratios = [a.ms / b.ms - 1 for a, b in zip(samples[name], samples[PAIRS[name]], strict=True)]
            row["overhead"] = {"over": PAIRS[name], "per_round": harness.summary(ratios)}
        rows.append(row)
    return rows


def problems(rows, on_gpu):
    """What must not be, in words: other bytes with the pack, the LoRA without effect, nothing fused, too high a cost."""
    by_name = {row["candidate"]: row for row in rows}
    found = [f"{row['candidate']}: not repeatable" for row in rows if not row["repeatable"]]
    if by_name["turbo"]["sha256"] != by_name["turbo+exact"]["sha256"]:
        found.append("turbo+exact: BYTES DIFFER from the LoRA alone")
    if by_name["exact"]["sha256"] != by_name["stock"]["sha256"]:
        found.append("exact: BYTES DIFFER from stock")
    if by_name["turbo"]["sha256"] == by_name["stock"]["sha256"]:
        found.append("turbo: the LoRA changed nothing")
    if on_gpu:  # a CPU fuses nothing, and its times say nothing
        found += [f"{row['candidate']}: NOTHING WAS FUSED" for row in rows if candidates.stood_by(row)]
        cost = by_name["turbo+exact"]["overhead"]["per_round"]["median"]
        if cost > LIMIT:
            found.append(f"turbo+exact: overhead {cost:.2%}, at most {LIMIT:.0%} is meant")
    return found


def arguments(argv):
    limit = f"Fails on a GPU when LoRA and pack together cost more than {LIMIT:.0%} over the pack alone."
    parser = command_line.parser("turbo", f"{__doc__}{limit}")
    model_arguments.add_common(parser)
    parser.add_argument("--weights", type=listed(one_of("weights", full_size.WEIGHTS)), default="bf16,int8",
                        help=f"{model_arguments.WEIGHTS} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--attention", choices=full_size.ATTENTIONS, default="fa2", help="fa2 is ComfyUI's default")
    parser.add_argument("--shape", type=saying(shapes.job), default="canonical", help=f"{model_arguments.SHAPES} (default: canonical)")
    parser.add_argument("--reps", type=saying(positive), default=3, help="timed rounds (default: 3)")
    return model_arguments.parse(parser, argv)


def main(argv):
    chosen = arguments(argv)
    device, model, job = chosen.device, chosen.model, chosen.shape
    model_arguments.require_gpu(chosen)
    comfy = _comfy.load(device, chosen.comfyui)
    model_arguments.require_attention(comfy, chosen)
    result = harness.start_result("turbo", device, argv, comfy.version)
    path = harness.out_path(chosen.out, "turbo", device)
    found = []
    with harness.guarded(result, path), torch.inference_mode(), machine.PowerLog(device, result):
        result["ceilings"] = harness.ceilings(device, job.rows, model.hidden)
        _comfy.first_sdpa_call(comfy, device)
        lora = random_lora(model, device)
        harness.log(f"LoRA: {len(lora)} modules, {sum(2 * (a.down.numel() + a.up.numel()) for a in lora.values()) / 2**30:.2f} GiB")
        for weights in chosen.weights:
            base = full_size.build(comfy, model, weights, device, chosen.seed)
            inputs = full_size.make_inputs(comfy, base, job, device)
            patchers = make_patchers(full_size.with_attention(comfy, base, chosen.attention), lora, dict(chosen.option))
            harness.log(f"{weights}, {model.blocks} blocks, {job.rows} rows, {chosen.attention}")
            rows = measure(comfy, patchers, inputs, chosen.attention, chosen.reps, device)
            common = {"model": model.name, "blocks": model.blocks, "weights": weights, "shape": job.name, "rows": job.rows,
                      "attention": chosen.attention, "attention_function": full_size.attention_name(comfy, chosen.attention, device),
                      "modules": len(lora), "rank": RANK}  # fmt: skip
            result["rows"] += [{**common, **row} for row in rows]
            for row in rows:
                harness.log("  " + describe(row, device))
            found += [f"{weights} {text}" for text in problems(rows, device.type == "cuda")]
            base = patchers = inputs = None
            full_size.release()
            harness.write_result(result, path)
    for text in found:
        print(text)
    return 1 if found else 0


def describe(row, device):
    """One line of the printed table."""
    timed = row["overhead"] if device.type == "cuda" else None
    cost = f", {timed['per_round']['median']:+.2%} over {timed['over']}" if timed else ""
    fused = f", {json.dumps(row['dispatch'])}" if row["dispatch"] else ""
    return f"{row['candidate']}: {row['ms']['median']:.1f} ms{cost}, peak +{row['peak_bytes'] / 1e9:.2f} GB, {row['sha256'][:12]}{fused}"

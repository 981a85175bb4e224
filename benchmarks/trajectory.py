"""Gates, then a whole trajectory: stock and a candidate must agree byte for byte, and the next gate waits for the one before.

bytes    one step of a small job, with the full-width model
linear   what the four Linears of blocks 0, 24 and 49 give in such a step
blocks   the stream after blocks 0, 24 and 49 in one step of the job
short    the latents after two sampling steps
full     the latents after all steps, and each step's prediction
"""

import argparse
import contextlib
import time
from unittest import mock

import torch

from ..kernels.patch import ops, scheduled
from . import _comfy, candidates, command_line, full_size, harness, machine, model_arguments, shapes
from .command_line import listed, one_of, positive, saying

GATES = ("bytes", "linear", "blocks", "short", "full")
WATCHED = (0, 24, 49)


def arguments(argv):
    parser = command_line.parser("trajectory", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments.add_common(parser)
    parser.add_argument("--weights", choices=full_size.WEIGHTS, default="bf16")
    parser.add_argument("--attention", choices=full_size.ATTENTIONS, default="fa2", help="fa2 is ComfyUI's default")
    parser.add_argument("--shape", type=saying(shapes.job), default="canonical", help=f"{model_arguments.SHAPES} (default: canonical)")
    parser.add_argument("--small-shape", type=saying(shapes.job), default="small",
                        help="job of the first two gates (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=saying(positive), default=12, help="sampling steps of the last gate (default: 12)")
    parser.add_argument("--candidate", choices=[name for name in candidates.CANDIDATES if name != "stock"],
                        default="exact")  # fmt: skip
    parser.add_argument("--gates", type=listed(one_of("gate", GATES)), default=",".join(GATES),
                        help="which gates to run; they keep their order (default: %(default)s)")  # fmt: skip
    chosen = model_arguments.parse(parser, argv)
    chosen.gates.sort(key=GATES.index)
    return chosen


class Watch:
    """Keeps copies of the stream after some blocks, through ``double_block`` replacements of a patcher clone.

    A replacement that only calls ``original_block`` is what other packs install too, so this also proves the chaining.
    """

    def __init__(self, patcher, blocks):
        self.kept = {}
        self.patcher = patcher.clone()
        for index in blocks:
            self.patcher.set_model_patch_replace(self._after(index), "dit", "double_block", index)

    def _after(self, index):
        def replacement(args, extra):
            out = extra["original_block"](args)
            self.kept[index] = out["img"].clone()
            return out

        return replacement


@contextlib.contextmanager
def products(comfy, model, rows):
    """While the block runs, keeps what the Linears of the watched blocks give for ``rows`` rows.

    Yields ``{(block, "qkv" | "out_proj" | "fc1" | "fc2"): output}``. Forward hooks would make the pack step aside, so the calls that a
    Linear of either side ends in are listened to: torch's, comfy-kitchen's INT8 one (stock's fc2), the pack's INT8 and NVFP4 ones.
    """
    names = {shape: name for name, shape in model.gemms().items()}
    blocks, kept, counts, inside = watched_blocks(model.blocks), {}, dict.fromkeys(names.values(), 0), []

    def listening(call, weight_of):
        def listen(*args, **kwargs):
            inside.append(call)  # a quantised weight's call may end in torch's with the plain one: one product
            try:
                out = call(*args, **kwargs)
            finally:
                inside.pop()
            shape = tuple(weight_of(args).shape)
            if not inside and out is not None and shape in names and tuple(out.shape) == (rows, shape[0]):
                name = names[shape]
                if counts[name] in blocks:
                    kept[counts[name], name] = out.clone()  # rope rotates the original in place
                counts[name] += 1
            return out

        return listen

    def second(args):
        return args[1]

    def of_layer(args):
        return args[2].weight

    with contextlib.ExitStack() as stack:
        for home, name, weight_of in ((torch.nn.functional, "linear", second), (comfy.quant_ops.ck, "int8_linear", second),
                                      (ops, "int8_gemm", second), (scheduled, "linear", of_layer)):  # fmt: skip
            stack.enter_context(mock.patch.object(home, name, listening(getattr(home, name), weight_of)))
        yield kept
    wrong = {name: count for name, count in counts.items() if count != model.blocks}
    if wrong:
        raise RuntimeError(f"saw {wrong} products of {model.blocks} blocks: this core's Linears end in another call")


def watched_blocks(blocks):
    """:data:`WATCHED`, or the first, middle and last block of a shallower model."""
    return WATCHED if blocks > WATCHED[-1] else tuple(sorted({0, blocks // 2, blocks - 1}))


class Run:
    """One model, one attention, one candidate, and the two sides of every gate."""

    def __init__(self, comfy, model, chosen, device):
        self.comfy, self.model, self.chosen, self.device = comfy, model, chosen, device
        self.job, self.options = chosen.shape, dict(chosen.option)
        stock = full_size.build(comfy, model, chosen.weights, device, chosen.seed)
        self.stock = full_size.with_attention(comfy, stock, chosen.attention)
        self.ours = self.reporting = candidates.make(chosen.candidate, self.stock, self.options)

    def _step(self, patcher, inputs):
        return full_size.run_step(self.comfy, patcher, inputs, self.chosen.attention)

    def bytes(self):
        inputs = full_size.make_inputs(self.comfy, self.stock, self.chosen.small_shape, self.device)
        stock, ours = self._step(self.stock, inputs), self._step(self.ours, inputs)
        row = {"steps": 1, "stock": {"sha256": harness.sha256(stock)}, "ours": {"sha256": harness.sha256(ours)}}
        row["detail"] = {"differing": [harness.differing(a, b) for a, b in zip(stock, ours, strict=True)],
                         "of": [tensor.numel() for tensor in stock]}  # fmt: skip
        return row, row["stock"] == row["ours"]

    def linear(self):
        job = self.chosen.small_shape
        inputs = full_size.make_inputs(self.comfy, self.stock, job, self.device)
        with products(self.comfy, self.model, job.rows) as stock:
            self._step(self.stock, inputs)
        with products(self.comfy, self.model, job.rows) as ours:
            self._step(self.ours, inputs)
        detail = {}
        for (index, name), a in stock.items():
            detail[f"{index} {name}"] = {"differing": harness.differing(a, ours[index, name]), "of": a.numel()}
        row = {"steps": 1, "stock": {"sha256": harness.sha256(stock.values())},
               "ours": {"sha256": harness.sha256(ours[key] for key in stock)}, "detail": detail}  # fmt: skip
        return row, not any(entry["differing"] for entry in detail.values())

    def blocks(self):
        inputs = full_size.make_inputs(self.comfy, self.stock, self.job, self.device)
        indices = watched_blocks(self.model.blocks)
        stock = Watch(self.stock, indices)
        ours = Watch(self.stock, indices)
        out_stock = self._step(stock.patcher, inputs)
        self.reporting = candidates.make(self.chosen.candidate, ours.patcher, self.options)
        out_ours = self._step(self.reporting, inputs)
        detail = {}
        for index in indices:
            a, b = stock.kept[index], ours.kept[index]
            detail[str(index)] = {"differing": harness.differing(a, b), "of": a.numel(), "sha256": harness.sha256([a])}
        row = {"steps": 1, "stock": {"sha256": harness.sha256(out_stock)}, "ours": {"sha256": harness.sha256(out_ours)}}
        row["detail"] = detail
        return row, row["stock"] == row["ours"] and not any(entry["differing"] for entry in detail.values())

    def _sample(self, patcher, steps):
        predictions = []
        start = time.perf_counter()
        latents = full_size.run_trajectory(
            self.comfy, patcher, self.job, steps, self.chosen.attention,
            on_step=lambda index, prediction: predictions.append((time.perf_counter(), harness.sha256(prediction))),
        )  # fmt: skip
        seconds = time.perf_counter() - start
        video, audio = latents
        ends = [start] + [at for at, _ in predictions]
        return {
            "video_sha256": harness.sha256([video]),
            "audio_sha256": harness.sha256([audio]),
            "prediction_sha256": [digest for _, digest in predictions],
            "seconds": round(seconds, 3),
            "step_seconds": [round(b - a, 3) for a, b in zip(ends, ends[1:], strict=False)],
            "finite": bool(torch.isfinite(video).all() and torch.isfinite(audio).all()),
            "std": [round(float(video.std()), 6), round(float(audio.std()), 6)],
        }

    def _trajectory(self, steps):
        self.reporting = self.ours
        stock, ours = self._sample(self.stock, steps), self._sample(self.ours, steps)
        equal = [key for key in ("video_sha256", "audio_sha256", "prediction_sha256") if stock[key] != ours[key]] == []
        pairs = zip(stock["prediction_sha256"], ours["prediction_sha256"], strict=True)
        first = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        detail = {"first_differing_step": first}
        if self.device.type == "cuda":
            detail["speedup"] = stock["seconds"] / ours["seconds"]
        return {"steps": steps, "stock": stock, "ours": ours, "detail": detail}, equal and stock["finite"]

    def short(self):
        return self._trajectory(2)

    def full(self):
        return self._trajectory(self.chosen.steps)


def run(chosen, argv):
    device, model, job = chosen.device, chosen.model, chosen.shape
    model_arguments.require_gpu(chosen)
    comfy = _comfy.load(device, chosen.comfyui)
    harness.log(f"ComfyUI {comfy.version} imported; device {device}")
    model_arguments.require_attention(comfy, chosen)
    result = harness.start_result("trajectory", device, argv, comfy.version)
    row = {"model": model.name, "blocks": model.blocks, "weights": chosen.weights, "shape": job.name, "rows": job.rows,
           "attention": chosen.attention, "candidate": chosen.candidate}  # fmt: skip
    row["attention_function"] = full_size.attention_name(comfy, chosen.attention, device)
    path = harness.out_path(chosen.out, "trajectory", device)
    failed = None
    with harness.guarded(result, path), torch.inference_mode(), machine.PowerLog(device, result):
        _comfy.first_sdpa_call(comfy, device)
        gates = Run(comfy, model, chosen, device)
        row["compute_dtype"] = str(gates.stock.model.get_dtype_inference()).removeprefix("torch.")
        harness.log(f"built {model.blocks} blocks of {model.name} in {chosen.weights}; attention {row['attention_function']}")
        for gate in chosen.gates:
            if failed:
                harness.log(f"gate {gate}: not run, because gate {failed} failed")
                result["rows"].append({**row, "gate": gate, "passed": None, "detail": {"waits_for": failed}})
                continue
            with _comfy.ErrorLog() as errors:
                entry, passed = getattr(gates, gate)()
            entry |= {"gate": gate, "passed": passed, "errors": errors.messages}
            entry["report"] = candidates.report(chosen.candidate, gates.reporting)
            entry["dispatch"] = candidates.dispatch(entry["report"])
            if device.type == "cuda" and candidates.stood_by(entry):
                # Stock against stock is no evidence.
                entry["passed"] = passed = False
            result["rows"].append({**row, **entry})
            harness.log(f"gate {gate}: {'passed' if passed else 'FAILED'}", entry["detail"], entry["dispatch"])
            if gate in ("short", "full"):
                for side in ("stock", "ours"):
                    harness.log(f"  {side}: {entry[side]['seconds']} s, video {entry[side]['video_sha256'][:16]}, "
                                f"audio {entry[side]['audio_sha256'][:16]}")  # fmt: skip
            failed = None if passed else gate
            harness.write_result(result, path)
    return 1 if failed else 0


def main(argv):
    return run(arguments(argv), argv)

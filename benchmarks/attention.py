"""``run.py bench attention``: every attention backend that can run here, on one full-size projection, in one run.

Rows: milliseconds (rounds in alternating order), error against float64 attention, whether the bytes are ComfyUI's, memory on top of q, k
and v, tensors copied; for a backend that cannot run, why. ``--fastest`` adds what ``fastest dense`` measures and chooses by itself.
"""

import argparse
import contextlib

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.attention import FASTEST, measure, plan, registry
from ..kernels.attention.backend import guard
from ..kernels.attention.call import Call
from ..kernels.attention.environment import Environment
from . import command_line, model_arguments, shapes
from .command_line import listed, one_of, positive, saying
from .harness import alternate, ceilings, guarded, log, out_path, start_result, summary
from .machine import PowerLog

# comfy.ops.SDPA_BACKEND_PRIORITY of ComfyUI 0.33
COMFYUI_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def stock(q, k, v):
    """ComfyUI 0.33's ``attention_pytorch`` on ``[1, S, H, D]`` views, with the copy of v that its H3 model makes. Returns ``[S, H*D]``."""
    with sdpa_kernel(COMFYUI_ORDER, set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.clone().transpose(1, 2))
    return out.transpose(1, 2).reshape(q.shape[1], -1)


def projection(model, rows, device):
    """q, k, v ``[1, rows, heads, head_dim]`` of one block, views of its bf16 qkv buffer: random weights, real norm and rotation."""
    import comfy_kitchen

    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    weight = (0.02 * randn(3 * model.inner, model.hidden)).bfloat16()
    qkv = randn(rows, model.hidden).bfloat16() @ weight.T
    q, k, v = (t.view(1, rows, model.heads, model.head_dim) for t in qkv.split(model.inner, -1))
    pairs = 3 * model.inv_freq
    angles = torch.rand(rows, pairs, device=device, generator=generator) * 100
    cos, sin = angles.cos(), angles.sin()
    freqs = torch.stack([cos, -sin, sin, cos], -1).reshape(1, rows, 1, pairs, 2, 2)
    ones = torch.ones(model.head_dim, device=device, dtype=torch.bfloat16)
    comfy_kitchen.rms_rope_split_half_(q, k, freqs, ones, ones, epsilon=1e-5, rot_dim=2 * pairs)
    return q, k, v


def _contenders(names, views, device):
    """({name: call}, rows for those that cannot run). The first call of each is made here, untimed."""
    env, call = Environment.of(device), Call.of(*views)
    able, rows = {"stock": (lambda: stock(*views), ())}, []
    for name in names:
        backend = registry.backend(name)
        verdict = guard(backend, call, env)
        reason = verdict.refusal or measure.small_run(backend, device, call.dtype, call.head_dim)
        if reason:
            rows.append({"backend": name, "class": backend.exactness, "skipped": reason})
            log(f"{name}: {reason}")
        else:
            able[name] = (lambda backend=backend, copies=verdict.copies: backend.launch(*views, copies), verdict.copies)
    return able, rows


def arguments(argv):
    parser = command_line.parser("attention", __doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_arguments.add_device(parser)
    parser.add_argument("--model", type=saying(shapes.model), default="h3", help=f"{', '.join(shapes.MODELS)} (default: %(default)s)")
    parser.add_argument("--job", "--shape", dest="job", type=saying(shapes.job), default="canonical",
                        help=f"{model_arguments.SHAPES} (default: canonical)")  # fmt: skip
    parser.add_argument("--backends", type=listed(one_of("backend", registry.CHOICES[2:])), default=list(registry.BACKENDS),
                        help=f"{','.join(registry.CHOICES[2:])} (default: all but the sliced ones)")  # fmt: skip
    parser.add_argument("--rounds", type=saying(positive), default=5, help="timed rounds (default: 5)")
    parser.add_argument("--fastest", action="store_true", help="also let fastest dense measure and choose")
    return parser.parse_args(argv)


def main(argv):
    args = arguments(argv)
    model_arguments.require_gpu(args)
    device, model, job, names = args.device, args.model, args.job, args.backends
    result = start_result("attention", device, argv)
    with torch.inference_mode(), guarded(result, out_path(args.out, "attention", device)):
        result["ceilings"] = ceilings(device, job.rows, model.hidden)
        views = projection(model, job.rows, device)
        log(f"q, k, v: {job.rows} rows x {model.heads} heads x {model.head_dim}, row stride {views[0].stride(1)}")
        # a process's first SDPA call on compute capability 9.0 ignores a priority list
        torch.nn.functional.scaled_dot_product_attention(*(t[:, :256].transpose(1, 2) for t in views))
        able, result["rows"] = _contenders(names, views, device)
        bytes_of_stock = stock(*views)
        facts = {}
        for name, (run, copies) in able.items():
            out = run()
            facts[name] = {"copies": list(copies), "relative_error": measure.relative_error(*views, out),
                           "equal_to_stock": measure.same_bytes(out, bytes_of_stock)}  # fmt: skip
            del out
        del bytes_of_stock

        cases = {name: (lambda run=run: contextlib.nullcontext(run)) for name, (run, _) in able.items()}
        with PowerLog(device, result):
            samples = alternate(cases, args.rounds, device, lambda *_: None)
        base = summary([s.ms for s in samples["stock"]])["median"]
        flop = 4 * job.rows**2 * model.inner
        for name, taken in sorted(samples.items(), key=lambda item: min(s.ms for s in item[1])):
            ms = summary([s.ms for s in taken])
            row = {"backend": name, "class": "E0" if name == "stock" else registry.backend(name).exactness,
                   "model": model.name, "shape": job.name, "rows": job.rows, "heads": model.heads, "head_dim": model.head_dim,
                   "ms": ms, "TFLOPs": flop / ms["median"] / 1e9, "speedup": base / ms["median"],
                   "peak_bytes": max(s.peak_bytes for s in taken), **facts[name]}  # fmt: skip
            result["rows"].append(row)
            speed = f"{row['TFLOPs']:7.1f} TFLOP/s {row['speedup']:6.3f}x  " if device.type == "cuda" else ""
            log(f"{name:<16}{ms['median']:9.2f} ms {speed}error {row['relative_error']:.2e}"
                f"  {'bytes of stock' if row['equal_to_stock'] else 'other bytes':<15} +{row['peak_bytes'] / 1e6:.0f} MB")  # fmt: skip
        if args.fastest:
            chosen = plan(FASTEST)
            chosen(*views, stock)
            result["plan"] = chosen.report()
            log(chosen.line())
            for line in result["plan"]["measured"]:
                log("  ", line)
    return 0

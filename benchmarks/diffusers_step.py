"""A whole denoiser step of diffusers' full-size MiniMax H3 (random BF16 weights), stock and accelerated in turn: time, memory, bytes.

Needs diffusers 0.42 or newer. The packed sequence is what diffusers' pipeline builds for a text-to-video job: text, sound, video.
"""

import contextlib
import gc
import statistics

import torch

from . import candidates, command_line, harness, machine, model_arguments, shapes
from .command_line import positive, saying

FP32_MODULES = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")  # as the released checkpoint has them


def features(text):
    """``{name: on}`` of ``NAME=0|1,...``. Raises ValueError."""
    pairs = [word.partition("=") for word in text.split(",")]
    return model_arguments.switches({name: {"0": False, "1": True}.get(value) for name, _, value in pairs})


def arguments(argv):
    parser = command_line.parser("diffusers_step", __doc__)
    model_arguments.add_model(parser)
    parser.add_argument("--shape", type=saying(shapes.job), default="canonical", help=f"{model_arguments.SHAPES} (default: canonical)")
    parser.add_argument("--attention-backend", help="diffusers' attention backend for both, such as _native_cudnn (default: diffusers')")
    parser.add_argument("--features", type=saying(features), default={}, metavar="NAME=0|1,...",
                        help="switch groups of ops, such as rope=0")  # fmt: skip
    parser.add_argument("--reps", type=saying(positive), default=3, help="timed rounds (default: 3)")
    return model_arguments.parse(parser, argv)


def build(model, device, seed=0):
    """``MiniMaxH3Transformer3DModel`` of a :class:`shapes.Model` on ``device``, random weights in BF16, :data:`FP32_MODULES` in fp32."""
    from diffusers import MiniMaxH3Transformer3DModel
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed

    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel(
            num_attention_heads=model.heads, attention_head_dim=model.head_dim, hidden_size=model.hidden, num_layers=model.blocks,
            num_refiner_layers=model.refiner_blocks, ffn_dim=model.ffn, text_dim=model.text_dim, time_embed_hidden_dim=model.hidden,
            time_embed_dim=model.hidden // 2, rope_freq_dim=model.inv_freq)
    for name, child in transformer.named_children():
        child.to(torch.float32 if name in FP32_MODULES else torch.bfloat16)
    transformer.to_empty(device=device)
    transformer.rope = MiniMaxH3RotaryPosEmbed(model.inv_freq).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            if weight.dim() == 1 and "norm" in name:
                weight.normal_(1, 0.1, generator=generator)  # a kernel that forgot the norm's weight must not pass
            else:
                weight.normal_(0, 0.02, generator=generator)
    return transformer.eval().requires_grad_(False)


def make_inputs(transformer, job, device, seed=1):
    """Arguments of one forward of ``job``, at t 0.5 for the picture and 0.8 for the sound."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    config = transformer.config
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device)

    tags = torch.ones(job.text, dtype=torch.long)
    positions, tags, video, audio, text, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, *job.latent, job.audio, tuple(config.patch_size), 2, audio_tag=2, video_tag=0)
    if positions.shape[0] != job.rows:
        raise RuntimeError(f"job {job.name}: shapes.py counts {job.rows} rows, diffusers packs {positions.shape[0]}")
    steps = torch.zeros(job.rows, dtype=torch.long)
    steps[audio] = 1
    structure = {"timestep_indices": steps, "token_tags": tags, "position_ids": positions, "video_indices": video,
                 "audio_indices": audio, "text_indices": text}  # fmt: skip
    return {
        "hidden_states": draw(1, len(video), config.in_channels * 4),
        "audio_hidden_states": draw(1, len(audio), config.audio_in_channels),
        "encoder_hidden_states": draw(1, len(text), config.text_dim).bfloat16(),
        "timestep": torch.tensor([0.5, 0.8], device=device),
        "return_dict": False,
        **{name: value.to(device) for name, value in structure.items()},
    }


@contextlib.contextmanager
def session(transformer, inputs, handle_of):
    """Yields ``step() -> (video, audio)``; ``handle_of()`` is entered around it."""
    with handle_of():
        yield lambda: transformer(**inputs)


def run(chosen, argv):
    device, model, job = chosen.device, chosen.model, chosen.shape
    model_arguments.require_gpu(chosen)
    try:
        import diffusers
    except ImportError:
        raise SystemExit("this Python has no diffusers, 0.42 or newer: python -m pip install diffusers") from None

    from ..kernels.patch.diffusers import Features, accelerate

    # On a CPU every op's only backend is its reference: the runner is exercised, no speed is measured.
    features = Features(**{"allow_eager": device.type == "cpu", **chosen.features})
    result = harness.start_result("diffusers_step", device, argv)
    result["environment"]["diffusers"] = diffusers.__version__
    path = harness.out_path(chosen.out, "diffusers_step", device)
    with harness.guarded(result, path), torch.inference_mode(), machine.PowerLog(device, result):
        result["ceilings"] = harness.ceilings(device, job.rows, model.hidden)
        transformer = build(model, device, chosen.seed)
        gc.collect()
        if chosen.attention_backend:
            transformer.set_attention_backend(chosen.attention_backend)
        inputs = make_inputs(transformer, job, device)
        harness.log(f"built {model.blocks} blocks of {model.name}; {job.name}, {job.rows} rows")
        handles = []

        def accelerated():
            handles.append(accelerate(transformer, features))
            return handles[-1]

        cases = {"stock": lambda: session(transformer, inputs, contextlib.nullcontext),
                 "exact": lambda: session(transformer, inputs, accelerated)}  # fmt: skip
        hashes, firsts, spread = {name: [] for name in cases}, {}, {}
        for name in ("stock", *cases):  # twice stock first: a process's first attention call may take another backend
            with cases[name]() as step:
                value, sample = harness.measure(step, device)
            hashes[name], firsts[name] = [harness.sha256(value)], sample.ms
            spread[name] = [round(float(tensor.float().std()), 6) for tensor in value]
            harness.log(f"  {name}: first call {sample.ms:.1f} ms, std {spread[name]}, {hashes[name][0][:12]}")
            del value
        samples = harness.alternate(cases, chosen.reps, device, lambda name, rep, value: hashes[name].append(harness.sha256(value)))
        for name, taken in samples.items():
            ratios = [a.ms / b.ms for a, b in zip(samples["stock"], taken, strict=True)]
            report = handles[-1].report() if name == "exact" else None
            row = {
                "model": model.name, "blocks": model.blocks, "weights": "bf16", "shape": job.name, "rows": job.rows, "candidate": name,
                "attention": report["attention"] if report else chosen.attention_backend or "diffusers' default",
                "first_call_ms": firsts[name], "std": spread[name], "ms": harness.summary([s.ms for s in taken]),
                "host_ms": harness.summary([s.host_ms for s in taken]), "resident_bytes": max(s.resident_bytes for s in taken),
                "peak_bytes": max(s.peak_bytes for s in taken), "sha256": hashes[name][0], "repeatable": len(set(hashes[name])) == 1,
                "equal_to_stock": set(hashes[name]) == {hashes["stock"][0]},
                "speedup": {"of_medians": statistics.median(s.ms for s in samples["stock"]) / statistics.median(s.ms for s in taken),
                            "per_round": harness.summary(ratios)},
                "report": report, "dispatch": candidates.dispatch(report),
            }  # fmt: skip
            result["rows"].append(row)
            speed = f"{row['speedup']['of_medians']:.4f} x stock, " if device.type == "cuda" else ""
            harness.log(
                f"  {name}: {row['ms']['median']:.1f} ms ({row['ms']['min']:.1f}-{row['ms']['max']:.1f}), "
                f"{speed}peak +{row['peak_bytes'] / 1e9:.3f} GB on {row['resident_bytes'] / 1e9:.2f}, "
                f"equal to stock {row['equal_to_stock']}, repeatable {row['repeatable']}, {row['dispatch'] or ''}")
    stock, exact = result["rows"]
    faults = [text for text, wrong in (
        ("BYTES DIFFER FROM STOCK", not exact["equal_to_stock"]),
        ("NOTHING WAS FUSED", not exact["dispatch"]["fused"]),
        ("THE PEAK IS ABOVE STOCK'S", exact["peak_bytes"] > stock["peak_bytes"])) if wrong]  # fmt: skip
    for text in faults:
        print(text)
    return 1 if faults else 0


def main(argv):
    return run(arguments(argv), argv)

"""Make a clip without ComfyUI: MiniMax H3 as diffusers has it, with this pack's kernels, to an MP4 with sound.

  run.py generate --prompt "a fox in the snow" --model DIR --out fox.mp4
  run.py generate --prompt "..." --first-frame a.png --last-frame b.png --model DIR --turbo TURBO.safetensors --out clip.mp4
  run.py generate --prompt "..." --reference person.png --reference voice.wav --model DIR --out clip.mp4
  run.py generate --prompt "..." --model DIR --out clip.mp4 --parallel 4   one clip on four GPUs (not yet run on several GPUs by us)

--model names a directory in diffusers' format. Without it a tiny random model is made on the spot: the clip is noise, nothing is
downloaded. The run record (times, hashes, which kernels ran and why not) is written beside the clip as NAME.json.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from . import environment, interpreter, locate

HELP = "make a clip with diffusers instead of ComfyUI"
ROOT = Path(__file__).resolve().parent.parent
RUNS_GENERATE = ("torch", "diffusers", "transformers", "torchvision", "peft", "accelerate", "safetensors", "av", "PIL", "tqdm")
TINY_SIZE = 64


def add_arguments(parser):
    parser.add_argument("--prompt", required=True, help="what the clip shows")
    parser.add_argument("--first-frame", type=Path, metavar="FILE", help="picture the clip starts with")
    parser.add_argument("--last-frame", type=Path, metavar="FILE", help="picture the clip ends with")
    parser.add_argument("--reference", type=Path, metavar="FILE", action="append", default=[],
                        help="picture, video or sound to follow; repeatable, in the order the model reads them")  # fmt: skip
    parser.add_argument("--width", type=int, help=f"pixels, a multiple of 32 (default: 1344; {TINY_SIZE} without --model)")
    parser.add_argument("--height", type=int, help=f"pixels, a multiple of 32 (default: 768; {TINY_SIZE} without --model)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="model calls (default: the Turbo file's, else 24; 4 without --model)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="MiniMax H3 in diffusers' format (default: a tiny random model)")
    parser.add_argument("--turbo", type=Path, metavar="FILE", help="Turbo LoRA; its steps and flow shifts are taken from what the file is")
    parser.add_argument("--attention", help="'stock (exact)' (default), 'fastest dense' or a backend's name")
    parser.add_argument("--stock", action="store_true", help="without this pack's kernels")
    parser.add_argument("--offload", action="store_true", help="keep each component on the CPU until it works")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="split one clip over N GPUs (diffusers' context parallelism)")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--python", metavar="EXE", help="Python that has torch and diffusers (default: this one, else .venv here)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the clip, .mp4")


def run(args):
    if args.out.suffix.lower() != ".mp4":
        raise environment.SetupError(f"--out {args.out}: the clip is an MP4 file, its name must end in .mp4")
    if args.parallel < 1:
        raise environment.SetupError(f"--parallel {args.parallel}: at least 1")
    python = python_for_diffusers(args.python)
    if not interpreter.is_this(python):
        return interpreter.go_on(python, "generate", sys.argv[2:])
    rank = int(os.environ.get("RANK", 0))
    if args.parallel > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.parallel)]
        return subprocess.call([*command, str(ROOT / "run.py"), "generate", *sys.argv[2:]])
    return generate(args, rank)


def python_for_diffusers(named=None, say=print):
    """An interpreter with all of :data:`RUNS_GENERATE`: ``named``, this one, or our own, which is made when absent.

    Raises ``environment.SetupError`` when ``named`` lacks something, or when our own cannot be made.
    """
    missing = locate.missing_modules(named or sys.executable, RUNS_GENERATE)
    if not missing:
        return Path(named or sys.executable)
    if named:
        raise environment.SetupError(f"--python {named} cannot run diffusers' H3: it has no {', '.join(missing)}.")
    return environment.ensure_venv(say=say)


def request_of(args):
    """The :class:`..h3.embedded.Request` of parsed arguments."""
    from ..h3.embedded import Request

    tiny = args.model is None
    return Request(
        prompt=args.prompt, width=args.width or (TINY_SIZE if tiny else 1344), height=args.height or (TINY_SIZE if tiny else 768),
        seconds=args.seconds, steps=args.steps or (4 if tiny and args.turbo is None else None), seed=args.seed,
        first_frame=args.first_frame, last_frame=args.last_frame, references=tuple(args.reference))


def generate(args, rank=0):
    """Make the clip in this process; returns the exit status. Of several ranks only the first one writes and speaks."""
    if rank:
        os.environ["TQDM_DISABLE"] = "1"  # one progress bar is enough; read when tqdm is imported
    import torch

    from ..h3 import embedded

    say = print if rank == 0 else lambda *_: None
    request = request_of(args)
    try:
        request.check()
        device = _join(args, torch) if args.parallel > 1 else args.device
        say(f"Loading {args.model or 'a tiny random model'} ...")
        engine = embedded.open_engine(args.model, bool(request.references), device, turbo=args.turbo, offload=args.offload,
                                      parallel=args.parallel > 1)  # fmt: skip
        if engine.turbo:
            say(f"Turbo: {engine.turbo[0].describe()}, {engine.turbo[1]}")
        clip = engine.generate(request, accelerated=not args.stock, attention=args.attention)
        if rank == 0:
            embedded.write_mp4(args.out, clip)
            path = args.out.with_suffix(".json")
            path.write_text(json.dumps({**clip.record, "ranks": args.parallel}, indent=1) + "\n", encoding="utf-8")
            say(f"{args.out}: {len(clip.frames)} frames of {request.width}x{request.height}; "
                f"{clip.record['total_ms'] / 1e3:.1f} s with the decoding; record in {path}")
    except ValueError as error:  # a request that cannot be made, or a file that is no use: the message is for the user
        print(f"run.py generate: {error}", file=sys.stderr)
        return 2
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def _join(args, torch):
    """Join the ranks that torchrun started; returns this rank's device."""
    wanted = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    index = int(os.environ["LOCAL_RANK"])
    if wanted == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(f"--parallel {args.parallel}: this machine has {torch.cuda.device_count()} GPU(s)")
    if wanted == "cuda":
        torch.cuda.set_device(index)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if wanted == "cuda" else "gloo")
    return torch.device("cuda", index) if wanted == "cuda" else torch.device(wanted)

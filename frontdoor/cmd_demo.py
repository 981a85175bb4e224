"""Make a small video with sound, start to end, in a real ComfyUI with random-weight models: no download, no GPU needed.

Finds ComfyUI, writes tiny H3 models into a temporary folder, starts the server there with only this pack, queues
workflows/api/demo_t2va.json, saves the MP4 and prints the run record. The picture is noise (the weights are random);
every stage is the real one. Nothing is installed into a Python that already runs ComfyUI.

Where no ComfyUI is found or can be fetched, diffusers makes the clip instead, with and without this pack's kernels.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from . import cmd_generate, embedded_demo, interpreter, locate
from .cmd_queue import load_graph, run_graph, save_outputs
from .server import Server, prepare_base

HELP = "make a small video with sound in a real ComfyUI, with random-weight models"
GRAPH = Path(__file__).resolve().parent.parent / "workflows" / "api" / "demo_t2va.json"
EXPECTED = {"video": "h264", "audio": "aac", "channels": 2, "sample_rate": 32000}


def add_arguments(parser):
    interpreter.add_arguments(parser)
    parser.add_argument("--out", metavar="DIR", default="demo_output", help="where the MP4 goes (default: ./demo_output)")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPU")
    parser.add_argument("--embedded", action="store_true", help="use diffusers although there is a ComfyUI")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="give up after so many seconds (default: %(default)s)")


def run(args):
    if args.embedded:
        return _embedded(args)
    try:
        tree = locate.require_comfyui(args.comfyui)
    except locate.NotFound as error:
        if args.comfyui or os.environ.get("COMFYUI_DIR"):  # named by the user, so no other engine is what was asked for
            raise
        print(f"{str(error).splitlines()[0]} Making the clip with diffusers instead.", flush=True)
        return _embedded(args)
    python = interpreter.for_comfyui(tree, args.python)
    if not interpreter.is_this(python):
        print(f"{tree.describe()}, run by {python}")
        passed = ["--comfyui", tree.path, "--python", python, "--out", Path(args.out).absolute(), "--timeout", args.timeout]
        return interpreter.go_on(python, "demo", passed + (["--cpu"] if args.cpu else []))
    return demo(tree, Path(args.out), args.cpu, args.timeout)


def _embedded(args):
    python = cmd_generate.python_for_diffusers(args.python)
    if not interpreter.is_this(python):
        passed = ["--embedded", "--out", Path(args.out).absolute(), *(["--cpu"] if args.cpu else [])]
        return interpreter.go_on(python, "demo", passed)
    return embedded_demo.run(Path(args.out), args.cpu)


def demo(tree, out, cpu, timeout):
    """Run the demo under this interpreter; returns the exit status."""
    import torch

    from ..h3.tiny import write_tiny_models

    began = time.monotonic()
    cpu = cpu or not torch.cuda.is_available()
    graph = load_graph(GRAPH)
    with tempfile.TemporaryDirectory(prefix="h3-vortex-demo-", ignore_cleanup_errors=True) as base:
        prepare_base(base)
        print("Writing random-weight H3 models ...", flush=True)
        write_tiny_models(Path(base) / "models", seed=0)
        where = "CPU" if cpu else torch.cuda.get_device_name()
        print(f"Starting ComfyUI on the {where} ...", flush=True)
        server = Server(tree.path, base, python=sys.executable, cpu=cpu)
        try:
            with server:
                print(f"Up after {server.start_seconds:.1f} s at {server.url}. Queuing {GRAPH.name}:", flush=True)
                result, paths = asyncio.run(_queue(server.url, graph, out, timeout))
        finally:
            if server.log_path:
                out.mkdir(parents=True, exist_ok=True)
                (out / "server.log").write_text(server.log, encoding="utf-8")
    if not result.ok:
        print(f"run.py demo: {result.message()}\nThe server's log is in {out / 'server.log'}", file=sys.stderr)
        return 1
    print("Run record:")
    for text in result.texts():
        print(_pretty(text))
    videos = [path for path in paths if path.suffix == ".mp4"]
    if not videos:
        print(f"run.py demo: no MP4 among the outputs {[str(path) for path in paths]}", file=sys.stderr)
        return 1
    found = describe_video(videos[0])
    print(f"\n{videos[0]}\n{found['text']}; {time.monotonic() - began:.0f} s in all")
    wrong = {key: found[key] for key, value in EXPECTED.items() if found[key] != value}
    if wrong:
        print(f"run.py demo: the file is not as expected: {wrong} instead of {EXPECTED}", file=sys.stderr)
        return 1
    return 0


async def _queue(url, graph, out, timeout):
    from .client import Client

    async with Client(url) as client:
        result = await run_graph(client, graph, timeout)
        return result, await save_outputs(client, result, out)


def describe_video(path):
    """Decode an MP4 with PyAV; returns its codecs, sizes and counts, and ``text``, the same for a person."""
    import av

    with av.open(str(path)) as file:
        video, audio = file.streams.video[0], (file.streams.audio or [None])[0]
        found = {
            "video": video.codec_context.name,
            "width": video.codec_context.width,
            "height": video.codec_context.height,
            "fps": float(video.average_rate),
            "audio": audio.codec_context.name if audio else None,
            "channels": audio.codec_context.channels if audio else 0,
            "sample_rate": audio.codec_context.sample_rate if audio else 0,
        }
        found["frames"] = sum(1 for _ in file.decode(video=0))
    if audio:
        with av.open(str(path)) as file:
            found["samples"] = sum(frame.samples for frame in file.decode(audio=0))
    found["text"] = "{video} {width}x{height}, {frames} frames at {fps:g}/s; {audio} {channels} channels {sample_rate} Hz".format(**found)
    return found


def _pretty(text):
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text

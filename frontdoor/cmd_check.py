"""Say for this machine which ops of the pack can run, whether they give stock's bytes, and how fast they are.

run.py check
run.py check --ops norm_modulate,swiglu
run.py check --out my-gpu.json
"""

import os
import subprocess
from pathlib import Path

from . import interpreter, locate

HELP = "which ops run on this machine, with which bytes and times"
ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser):
    interpreter.add_arguments(parser)
    parser.add_argument("--ops", help="names, comma separated (default: all)")
    parser.add_argument("--out", help="also write everything to this JSON file: the evidence to send from a GPU nobody here has")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default cuda where there is one")


def run(args):
    tree = locate.require_comfyui(args.comfyui)
    python = interpreter.for_comfyui(tree, args.python)
    options = [f"--{name}={getattr(args, name)}" for name in ("ops", "out", "device") if getattr(args, name)]
    return subprocess.call([str(python), str(ROOT / "benchmarks"), "check", *options], env={**os.environ, "COMFYUI_DIR": str(tree.path)})

"""Measure the pack against stock ComfyUI on this machine; everything after the name goes to the benchmark.

run.py bench step --weights bf16,int8 --attention fa2,cudnn --shape canonical
run.py bench trajectory --steps 12
run.py bench compare A.json B.json
"""

import argparse
import os
import subprocess
from pathlib import Path

from . import interpreter, locate

HELP = "measure the pack against stock on this machine"
ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser):
    interpreter.add_arguments(parser)
    parser.add_argument("benchmark", metavar="NAME", help="step, block, trajectory, compare, ... (a wrong one lists them)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments; --help for a list")


def run(args):
    tree = locate.require_comfyui(args.comfyui)
    python = interpreter.for_comfyui(tree, args.python)
    environ = {**os.environ, "COMFYUI_DIR": str(tree.path)}
    return subprocess.call([str(python), str(ROOT / "benchmarks"), args.benchmark, *args.rest], env=environ)

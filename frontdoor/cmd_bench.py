"""Measure the pack against stock ComfyUI on this machine; everything after the name goes to the benchmark.

run.py bench step --weights bf16,int8 --attention fa2,cudnn --shape canonical
run.py bench trajectory --steps 12
run.py bench compare A.json B.json
run.py bench registry                 what was tried, and what became of it
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from . import interpreter, locate
from .environment import SetupError

HELP = "measure the pack against stock on this machine"
ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
READERS = ("compare", "registry", "plot")  # read result files: no ComfyUI and no torch


def add_arguments(parser):
    interpreter.add_arguments(parser)
    parser.add_argument("benchmark", metavar="NAME", help="step, block, trajectory, compare, ... (a wrong one lists them)")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments; --help for a list")


def run(args):
    if not BENCHMARKS.is_dir():
        raise SetupError(f"there is no {BENCHMARKS}: the copy of this pack in ComfyUI's registry has none; use a clone of its repository")
    # A name that is no file here is refused at once, before a ComfyUI is looked for.
    if args.benchmark in READERS or args.rest[:1] == ["--compare"] or not (BENCHMARKS / f"{args.benchmark}.py").is_file():
        return subprocess.call([args.python or sys.executable, str(BENCHMARKS), args.benchmark, *args.rest])
    tree = locate.require_comfyui(args.comfyui)
    python = interpreter.for_comfyui(tree, args.python)
    environ = {**os.environ, "COMFYUI_DIR": str(tree.path)}
    return subprocess.call([str(python), str(BENCHMARKS), args.benchmark, *args.rest], env=environ)

"""Make the pack's own .venv (torch, what ComfyUI needs, the test tools) and say which ComfyUI is found.

Only needed ahead of time, for instance while there is a network: the other commands call it when they have to.
On Linux the ordinary package index gives the CUDA build of torch; to have another build, configure pip for it first.
"""

from . import environment, locate

HELP = "make the pack's own .venv and find or fetch ComfyUI"


def add_arguments(parser):
    parser.add_argument("--comfyui", metavar="DIR", help="ComfyUI folder (default: COMFYUI_DIR, the tree this pack is in, the cache)")


def run(args):
    environment.ensure_venv()
    print(f"{environment.ROOT / '.venv'} is up to date.")
    tree = locate.require_comfyui(args.comfyui)
    print(tree.describe())
    return 0

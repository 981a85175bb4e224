"""ComfyUI, imported into this process as its library half: the model code, the patcher and the samplers, no server."""

import importlib
import logging
import sys
from types import SimpleNamespace

import torch

from ..frontdoor import locate, torchvision_hook

MODULES = {
    "attention": "comfy.ldm.modules.attention",
    "minimax": "comfy.ldm.minimax.model",
    "model_management": "comfy.model_management",
    "model_patcher": "comfy.model_patcher",
    "nested_tensor": "comfy.nested_tensor",
    "ops": "comfy.ops",
    "patcher_extension": "comfy.patcher_extension",
    "quant_ops": "comfy.quant_ops",
    "sample": "comfy.sample",
    "samplers": "comfy.samplers",
    "sd": "comfy.sd",
}


def load(device, tree=None):
    """Import ComfyUI for computing on ``device`` and return its modules.

    ComfyUI is set up as its own flags would: ``--cpu`` on a CPU, ``--highvram`` on a GPU (weights stay resident, no
    dynamic VRAM). A ComfyUI that the process already imported keeps the flags it has.

    Returns:
        A namespace with the modules of :data:`MODULES`, ``version`` (text) and ``path``.

    Raises:
        SystemExit: there is no ComfyUI >= 0.33; the message says where it was looked for.
    """
    try:
        found = locate.find_comfyui(tree)
    except locate.NotFound as error:
        sys.exit(str(error))
    if found is None:
        sys.exit("the full-size benchmarks run ComfyUI's own model: set COMFYUI_DIR to a ComfyUI >= 0.33")
    torchvision_hook.install()
    if str(found.path) not in sys.path:
        sys.path.insert(0, str(found.path))
    fresh = "comfy.model_management" not in sys.modules
    from comfy.cli_args import args  # reads no command line unless comfy.options says so

    if fresh:
        args.cpu, args.highvram = device.type == "cpu", device.type == "cuda"
    modules = {name: importlib.import_module(path) for name, path in MODULES.items()}
    used = modules["model_management"].get_torch_device()
    if used.type != device.type:
        sys.exit(f"ComfyUI computes on {used} in this process, the benchmark on {device}: start it in a process of its own")
    return SimpleNamespace(**modules, version=".".join(map(str, found.version)), path=found.path)


class ErrorLog(logging.Handler):
    """Collects what ComfyUI logs as an error while a ``with`` block runs.

    ComfyUI's Sage attention falls back to SDPA on failure and only logs it; a row measured that way must say so.
    """

    def __init__(self):
        super().__init__(logging.ERROR)
        self.messages = []

    def emit(self, record):
        message = record.getMessage()
        if message not in self.messages and len(self.messages) < 20:
            self.messages.append(message)

    def __enter__(self):
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger().removeHandler(self)


def first_sdpa_call(comfy, device):
    """Make one throw-away SDPA call through ComfyUI on a GPU.

    On SM90 the first ``sdpa_kernel(..., set_priority=True)`` of a process does not have its order respected (torch
    installs a cuDNN-first order on first use), so a run that started with FlashAttention would compare two backends.
    """
    if device.type == "cuda":
        q = torch.randn(1, 8, 256, 128, device=device, dtype=torch.bfloat16)
        comfy.ops.scaled_dot_product_attention(q, q, q)
        torch.cuda.synchronize(device)

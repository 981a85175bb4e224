"""A node for the soak test's server: what the process holds right now. Copied into its ``custom_nodes``; never shipped."""

import gc
import json
import os
import threading

import psutil
import torch


class Memory:
    CATEGORY = "H3 test"
    FUNCTION = "run"
    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls):
        return float("nan")

    def run(self):
        gc.collect()
        tensors = [item.untyped_storage() for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.layout == torch.strided]
        held = {storage.data_ptr(): storage.nbytes() for storage in tensors if storage.device.type != "meta"}
        process = psutil.Process(os.getpid())
        told = {"tensor_bytes": sum(held.values()), "rss": process.memory_info().rss, "threads": threading.active_count(),
                "files": process.num_fds() if hasattr(process, "num_fds") else 0}  # fmt: skip
        return {"ui": {"text": [json.dumps(told)]}}


NODE_CLASS_MAPPINGS = {"H3TestMemory": Memory}

"""A small random LoRA for the tiny models, and the two ways ComfyUI applies one without dynamic VRAM."""

import torch

LAYERS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def state_dict(diffusion_model, layers=LAYERS, rank=4, seed=3):
    generator = torch.Generator("cpu").manual_seed(seed)
    tensors = {}
    for index, block in enumerate(diffusion_model.blocks):
        for name in layers:
            out, width = block.get_submodule(name).weight.shape
            key = f"diffusion_model.blocks.{index}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.05
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.05
    return tensors


def add(patcher, layers=LAYERS):
    """A clone of ``patcher`` with the LoRA at strength 1."""
    import comfy.sd

    return comfy.sd.load_lora_for_models(patcher, None, state_dict(patcher.model.diffusion_model, layers), 1.0, 0.0)[0]


def keep_weights_out(monkeypatch):
    """From here on every model loads as with too little memory: LoRAs act on the weight in each call ("lowvram")."""
    import comfy.model_patcher

    load = comfy.model_patcher.ModelPatcher.load

    def lowvram(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        return load(self, device_to, 1, force_patch_weights, False)

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "load", lowvram)

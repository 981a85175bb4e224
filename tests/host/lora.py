"""A small random LoRA for the tiny models, and the two ways ComfyUI applies one without dynamic VRAM."""

import torch

LAYERS = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")


def tensors(blocks, widths, rank=4, seed=3):
    """``widths``: layer -> (outputs, inputs), for every block."""
    generator = torch.Generator("cpu").manual_seed(seed)
    found = {}
    for index in range(blocks):
        for name, (out, width) in widths.items():
            key = f"diffusion_model.blocks.{index}.{name}"
            found[f"{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.05
            found[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.05
    return found


def add(patcher, layers=LAYERS):
    """A clone of ``patcher`` with the LoRA at strength 1."""
    import comfy.sd

    blocks = patcher.model.diffusion_model.blocks
    widths = {name: tuple(blocks[0].get_submodule(name).weight.shape) for name in layers}
    return comfy.sd.load_lora_for_models(patcher, None, tensors(len(blocks), widths), 1.0, 0.0)[0]


def keep_weights_out(monkeypatch):
    """From here on every model loads as with too little memory: LoRAs act on the weight in each call ("lowvram")."""
    import comfy.model_patcher

    load = comfy.model_patcher.ModelPatcher.load

    def lowvram(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        return load(self, device_to, 1, force_patch_weights, False)

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "load", lowvram)

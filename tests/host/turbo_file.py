"""Small random Turbo LoRA files for the tiny models, in the key forms that are in circulation."""

import torch

BLOCK = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
FOUR = "minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors"
EIGHT = "minimax_h3_fl2v_turbo_8step_v1.0_bf16.safetensors"


def layers(diffusion_model):
    """``{layer: (out, in)}`` that a Turbo file covers."""
    names = [f"{prefix}{i}.{layer}" for prefix, blocks in (
        ("blocks.", diffusion_model.blocks), ("token_refiner.blocks.", diffusion_model.token_refiner.blocks))
        for i in range(len(blocks)) for layer in BLOCK]  # fmt: skip
    return {name: tuple(diffusion_model.get_submodule(name).weight.shape) for name in names}


def diffusers_tensors(shapes, rank=4, seed=3, size=0.05, alpha=None, dtype=torch.float32):
    """A diffusers file for these layers: q, k and v apart, ``[value; gate]``."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def pair(name, out, width):
        tensors[f"transformer.{name}.lora_A.weight"] = (torch.randn(rank, width, generator=generator) * width**-0.5).to(dtype)
        tensors[f"transformer.{name}.lora_B.weight"] = (torch.randn(out, rank, generator=generator) * size).to(dtype)
        if alpha is not None:
            tensors[f"transformer.{name}.alpha"] = torch.tensor(float(alpha))

    tensors = {}
    for layer, (out, width) in shapes.items():
        base, _, kind = layer.rpartition(".")
        base = base.removesuffix(".attn").removesuffix(".mlp")
        base = base.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.") if base.startswith("token") else f"transformer_{base}"
        if kind == "qkv_proj":
            for part in "qkv":
                pair(f"{base}.attn.to_{part}", out // 3, width)
        else:
            pair(base + {"out_proj": ".attn.to_out.0", "fc1": ".ff.net.0.proj", "fc2": ".ff.net.2"}[kind], out, width)
    return tensors


def comfy_tensors(shapes, alpha=None, **more):
    """The same LoRA in ComfyUI's form: rank-3r fused q/k/v with block-diagonal B, ``[gate; value]``."""
    source = diffusers_tensors(shapes, alpha=None, **more)
    tensors = {}
    for layer, _ in shapes.items():
        base, _, kind = layer.rpartition(".")
        base = base.removesuffix(".attn").removesuffix(".mlp")
        base = base.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.") if base.startswith("token") else f"transformer_{base}"
        names = {
            "qkv_proj": [f"{base}.attn.to_{part}" for part in "qkv"], "out_proj": [f"{base}.attn.to_out.0"],
            "fc1": [f"{base}.ff.net.0.proj"], "fc2": [f"{base}.ff.net.2"]}[kind]  # fmt: skip
        down, up = ([source[f"transformer.{name}.lora_{letter}.weight"] for name in names] for letter in "AB")
        key = f"diffusion_model.{layer}"
        tensors[f"{key}.lora_A.weight"] = torch.cat(down)
        tensors[f"{key}.lora_B.weight"] = torch.block_diag(*up) if kind != "fc1" else torch.cat(up[0].chunk(2)[::-1])
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(float(alpha * len(names)))
    return tensors



def write(models_dir):
    """Put a Turbo file for the tiny models under two published names into ``models_dir/loras``; alpha as the published files state it."""
    from h3_vortex.h3 import tiny
    from safetensors.torch import save_file

    inner = tiny.HEADS * tiny.HEAD_DIM
    widths = dict(zip(BLOCK, (
        (3 * inner, tiny.HIDDEN), (tiny.HIDDEN, inner), (2 * tiny.FFN, tiny.HIDDEN), (tiny.HIDDEN, tiny.FFN)), strict=True))  # fmt: skip
    shapes = {f"{prefix}.{i}.{layer}": shape for prefix, count in (("blocks", tiny.LAYERS), ("token_refiner.blocks", tiny.REFINER_LAYERS))
              for i in range(count) for layer, shape in widths.items()}  # fmt: skip
    folder = models_dir / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(comfy_tensors(shapes, alpha=4, dtype=torch.bfloat16), folder / FOUR)
    save_file(diffusers_tensors(shapes, dtype=torch.bfloat16), folder / EIGHT, {"alpha": "2"})

"""Random VAEs and text encoder with the full shapes of MiniMax H3 in files of a few MB.

ComfyUI fixes the widths of these networks (``comfy/ldm/minimax/vae.py`` and ``audio_vae.py``, ``comfy/text_encoders``),
so the tensors must have their full shapes. Every large one is a strided view of a short random vector
(``W[i, j] = s[2 i + j]``, a Hankel matrix): ``torch.save`` keeps a tensor as (storage, offset, size, stride), and
``torch.load(weights_only=True)`` gives the same view back, so the file and the memory stay small.
"""

from __future__ import annotations

import math

import torch

from .tiny import comfy_quant

F16, F32 = torch.float16, torch.float32

VIDEO_DIM, VIDEO_LAYERS, VIDEO_LATENT = 2048, 36, 24
VIDEO_CHANNELS = tuple(128 * m for m in (1, 2, 2, 4, 4, 8))
VIDEO_DOWNSAMPLES = (True, True, True, True, False, False)

AUDIO_DIM, AUDIO_LATENT, AUDIO_UP = 2048, 32, 1024
AUDIO_ENCODER_STRIDES = (2, 4, 4, 5, 5)
AUDIO_DECODER_KERNELS = (9, 9, 4, 4, 4, 4, 4)

TEXT_HIDDEN, TEXT_FFN, TEXT_LAYERS, TEXT_HEADS, TEXT_KV_HEADS, TEXT_HEAD_DIM = 5120, 25600, 50, 64, 8, 128
VOCABULARY = 151936
VISION_HIDDEN, VISION_FFN, VISION_LAYERS, VISION_POSITIONS, VISION_DEEPSTACK = 1152, 4304, 27, 2304, 3


class _Thin(dict):
    """A state dict that is filled layer by layer with strided random views."""

    def __init__(self, gen, dtype):
        super().__init__()
        self.gen, self.dtype = gen, dtype

    def view(self, *shape, std):
        # strides 1, 2, 3, .. from the last axis: rows differ, and the vector behind stays short
        strides = list(range(1, len(shape) + 1))[::-1]
        length = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        values = (torch.randn(length, generator=self.gen) * std).to(self.dtype)
        return values.as_strided(shape, strides)

    def linear(self, name, out, width, bias=True):
        self[name + ".weight"] = self.view(out, width, std=width**-0.5)
        if bias:
            self[name + ".bias"] = self.view(out, std=0.02)

    def int8(self, name, out, width, scale):
        data = torch.randint(-127, 128, (2 * out + width,), generator=self.gen, dtype=torch.int8)
        self[name + ".weight"] = data.as_strided((out, width), (2, 1))
        self[name + ".weight_scale"] = scale
        self[name + ".comfy_quant"] = comfy_quant({"format": "int8_tensorwise"})

    def norm(self, name, width, bias=False):
        self[name + ".weight"] = torch.ones(width, dtype=self.dtype)
        if bias:
            self[name + ".bias"] = torch.zeros(width, dtype=self.dtype)

    def conv(self, name, out, width, *kernel, bias=True, transposed=False):
        shape = (width, out, *kernel) if transposed else (out, width, *kernel)
        self[name + ".weight"] = self.view(*shape, std=(width * math.prod(kernel)) ** -0.5)
        if bias:
            self[name + ".bias"] = self.view(out, std=0.02)


# Standard deviation of integers uniform in [-127, 127]; dividing by it gives an int8 layer unit-scaled weights.
INT8_STD = 73.3


def video_vae(gen):
    """MiniMaxH3VideoVAE: convolutional encoder, transformer decoder of 36 x 2048."""
    sd = _Thin(gen, F16)
    sd.linear("decoder.x_embedder", VIDEO_DIM, VIDEO_LATENT)
    sd["decoder.register_tokens"] = sd.view(1, 4, VIDEO_DIM, std=0.02)
    sd["decoder.mask_token"] = torch.zeros(1, 1, VIDEO_DIM, dtype=F16)
    for i in range(VIDEO_LAYERS):
        prefix = f"decoder.transformer_blocks.{i}."
        sd.norm(prefix + "norm1", VIDEO_DIM)
        sd.norm(prefix + "norm2", VIDEO_DIM)
        if i == 0:
            # One quantised layer switches ComfyUI to mixed_precision_ops, whose loader keeps tensors by reference:
            # without it every view would be copied into a full-size parameter (5 GB).
            qkv_scale = torch.full((3 * VIDEO_DIM, 1), VIDEO_DIM**-0.5 / INT8_STD, dtype=F32)
            sd.int8(prefix + "attn.to_qkv", 3 * VIDEO_DIM, VIDEO_DIM, qkv_scale)
            sd[prefix + "attn.to_qkv.bias"] = sd.view(3 * VIDEO_DIM, std=0.02)
        else:
            sd.linear(prefix + "attn.to_qkv", 3 * VIDEO_DIM, VIDEO_DIM)
        sd.linear(prefix + "attn.to_out", VIDEO_DIM, VIDEO_DIM)
        sd.linear(prefix + "ff.w1", 8 * VIDEO_DIM, VIDEO_DIM)
        sd.linear(prefix + "ff.w2", VIDEO_DIM, 4 * VIDEO_DIM)
        sd[prefix + "scale1"] = torch.full((VIDEO_DIM,), 0.1, dtype=F16)
        sd[prefix + "scale2"] = torch.full((VIDEO_DIM,), 0.1, dtype=F16)
    sd.norm("decoder.norm_out", VIDEO_DIM, True)
    sd.linear("decoder.proj_out", 3 * 4 * 16 * 16, VIDEO_DIM)
    sd["latents_mean"], sd["latents_std"] = torch.zeros(VIDEO_LATENT), torch.ones(VIDEO_LATENT)
    sd.conv("quant_conv", 2 * VIDEO_LATENT, 2 * VIDEO_LATENT, 1, 1, 1)
    sd.conv("post_quant_conv", VIDEO_LATENT, VIDEO_LATENT, 1, 1, 1)
    width = VIDEO_CHANNELS[0]
    sd.conv("encoder.conv_in", width, 3, 3, 3, 3)
    for level, out in enumerate(VIDEO_CHANNELS):
        for b in range(2):
            prefix = f"encoder.down.{level}.block.{b}."
            sd.norm(prefix + "norm1", width, True)
            sd.norm(prefix + "norm2", out, True)
            sd.conv(prefix + "conv1", out, width, 3, 3, 3)
            sd.conv(prefix + "conv2", out, out, 3, 3, 3)
            if width != out:
                sd.conv(prefix + "nin_shortcut", out, width, 1, 1, 1)
            width = out
        if VIDEO_DOWNSAMPLES[level]:
            sd.conv(f"encoder.down.{level}.downsample.conv", out, out, 3, 3, 3)
    sd.norm("encoder.norm_out", width, True)
    sd.conv("encoder.conv_out", 2 * VIDEO_LATENT, width, 3, 3, 3)
    return dict(sd)


def audio_vae(gen):
    """MiniMaxH3AudioVAE: DAC encoder, BigVGAN decoder, 32 kHz, float32."""
    sd = _Thin(gen, F32)
    _audio_encoder(sd)
    sd.conv("mean_proj", AUDIO_LATENT, AUDIO_LATENT, 1)
    sd.conv("logs_proj", AUDIO_LATENT, AUDIO_LATENT, 1)
    sd.conv("dec_in_proj", AUDIO_DIM, AUDIO_LATENT, 1)
    _audio_decoder(sd)
    sd["latents_mean"], sd["latents_std"] = torch.zeros(AUDIO_LATENT), torch.ones(AUDIO_LATENT)
    return dict(sd)


def _audio_encoder(sd):
    def snake(name, channels):
        sd[name + ".alpha"] = torch.ones(1, channels, 1)

    width = 64
    sd.conv("encoder.block.0", width, 1, 7)
    for index, stride in enumerate(AUDIO_ENCODER_STRIDES, start=1):
        prefix = f"encoder.block.{index}.block."
        for unit in range(3):
            inside = f"{prefix}{unit}.block."
            snake(inside + "0", width)
            sd.conv(inside + "1", width, width, 7)
            snake(inside + "2", width)
            sd.conv(inside + "3", width, width, 1)
        snake(prefix + "3", width)
        sd.conv(prefix + "4", 2 * width, width, 2 * stride)
        width *= 2
    snake("encoder.block.6", width)
    sd.conv("encoder.block.7", AUDIO_DIM, width, 3)

    sd.norm("pre_block.norm1", AUDIO_DIM, True)
    sd.norm("pre_block.norm2", AUDIO_LATENT, True)
    sd.norm("pre_block.norm3", AUDIO_DIM, True)
    sd.linear("pre_block.attn.qkv", 3 * AUDIO_DIM, AUDIO_DIM, bias=False)
    for bias in ("q_bias", "v_bias", "zero_k_bias"):
        sd["pre_block.attn." + bias] = torch.zeros(AUDIO_DIM)
    sd.linear("pre_block.attn.proj", AUDIO_LATENT, AUDIO_LATENT)
    sd.linear("pre_block.proj", AUDIO_LATENT, AUDIO_DIM)
    sd.norm("pre_block.mlp.norm", AUDIO_LATENT, True)
    sd.linear("pre_block.mlp.w0", 2 * AUDIO_LATENT, AUDIO_LATENT)
    sd.linear("pre_block.mlp.w1", 2 * AUDIO_LATENT, AUDIO_LATENT)
    sd.linear("pre_block.mlp.w2", AUDIO_LATENT, 2 * AUDIO_LATENT)


def _audio_decoder(sd):
    lowpass = _lowpass_filter()

    def snake_beta(name, channels):
        sd[name + ".act.alpha"] = torch.zeros(channels)
        sd[name + ".act.beta"] = torch.zeros(channels)
        sd[name + ".upsample.filter"] = sd[name + ".downsample.lowpass.filter"] = lowpass

    width = AUDIO_UP
    sd.conv("decoder.conv_pre", width, AUDIO_DIM, 7)
    for level, kernel in enumerate(AUDIO_DECODER_KERNELS):
        out = width // 2
        sd.conv(f"decoder.ups.{level}.0", out, width, kernel, transposed=True)
        for branch, size in enumerate((3, 7, 11)):
            prefix = f"decoder.resblocks.{level * 3 + branch}."
            for unit in range(3):
                sd.conv(f"{prefix}convs1.{unit}", out, out, size)
                sd.conv(f"{prefix}convs2.{unit}", out, out, size)
            for unit in range(6):
                snake_beta(f"{prefix}activations.{unit}", out)
        width = out
    snake_beta("decoder.activation_post", width)
    sd.conv("decoder.conv_post", 1, width, 7, bias=False)


def _lowpass_filter():
    """The anti-aliasing filter of BigVGAN's activations: 12-tap Kaiser-windowed sinc, cutoff 0.25, half width 0.3."""
    attenuation = 2.285 * (12 // 2 - 1) * math.pi * 4 * 0.3 + 7.95
    beta = 0.1102 * (attenuation - 8.7)  # Kaiser's formula above 50 dB
    taps = torch.arange(-6, 6) + 0.5
    window = 0.5 * torch.kaiser_window(12, beta=beta, periodic=False) * torch.sinc(0.5 * taps)
    return (window / window.sum()).view(1, 1, 12)


def text_encoder(gen):
    """Qwen3-VL 32B cut to its first 50 layers, as MiniMax H3 uses it, with the vision tower."""
    sd = _Thin(gen, F16)
    # quantised for the same reason as the first layer of the video VAE
    sd.int8("model.embed_tokens", VOCABULARY, TEXT_HIDDEN, torch.full((), 0.02 / INT8_STD, dtype=F32))
    query, key_value = TEXT_HEADS * TEXT_HEAD_DIM, TEXT_KV_HEADS * TEXT_HEAD_DIM
    for i in range(TEXT_LAYERS):
        prefix = f"model.layers.{i}."
        sd.norm(prefix + "input_layernorm", TEXT_HIDDEN)
        sd.norm(prefix + "post_attention_layernorm", TEXT_HIDDEN)
        sd.linear(prefix + "self_attn.q_proj", query, TEXT_HIDDEN, bias=False)
        sd.linear(prefix + "self_attn.k_proj", key_value, TEXT_HIDDEN, bias=False)
        sd.linear(prefix + "self_attn.v_proj", key_value, TEXT_HIDDEN, bias=False)
        sd.linear(prefix + "self_attn.o_proj", TEXT_HIDDEN, query, bias=False)
        sd.norm(prefix + "self_attn.q_norm", TEXT_HEAD_DIM)
        sd.norm(prefix + "self_attn.k_norm", TEXT_HEAD_DIM)
        sd.linear(prefix + "mlp.gate_proj", TEXT_FFN, TEXT_HIDDEN, bias=False)
        sd.linear(prefix + "mlp.up_proj", TEXT_FFN, TEXT_HIDDEN, bias=False)
        sd.linear(prefix + "mlp.down_proj", TEXT_HIDDEN, TEXT_FFN, bias=False)
    sd.conv("visual.patch_embed.proj", VISION_HIDDEN, 3, 2, 16, 16)
    sd["visual.pos_embed.weight"] = sd.view(VISION_POSITIONS, VISION_HIDDEN, std=0.02)
    for i in range(VISION_LAYERS):
        prefix = f"visual.blocks.{i}."
        sd.norm(prefix + "norm1", VISION_HIDDEN, True)
        sd.norm(prefix + "norm2", VISION_HIDDEN, True)
        sd.linear(prefix + "attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        sd.linear(prefix + "attn.proj", VISION_HIDDEN, VISION_HIDDEN)
        sd.linear(prefix + "mlp.linear_fc1", VISION_FFN, VISION_HIDDEN)
        sd.linear(prefix + "mlp.linear_fc2", VISION_HIDDEN, VISION_FFN)
    merged = 4 * VISION_HIDDEN
    for prefix, normed in [("visual.merger.", VISION_HIDDEN)] + [
        (f"visual.deepstack_merger_list.{i}.", merged) for i in range(VISION_DEEPSTACK)
    ]:
        sd.norm(prefix + "norm", normed, True)
        sd.linear(prefix + "linear_fc1", merged, merged)
        sd.linear(prefix + "linear_fc2", TEXT_HIDDEN, merged)
    return dict(sd)

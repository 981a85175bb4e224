"""A random MiniMax H3 in diffusers' and transformers' own classes, small enough for a CPU to make a clip in seconds. Nothing is downloaded.

Every component is the real class with a reduced configuration: transformer, video and audio VAE, both schedulers, and the Qwen3-VL
conditioner with a byte-level tokenizer whose vocabulary is written here. The output is noise with the right shape, rate and length.
"""

from __future__ import annotations

import torch

TEXT_WIDTH, TEXT_LAYERS = 32, 51  # the pipeline reads the hidden state after layer 50, which must not be the last
SPECIAL_TOKENS = ("<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# width 128 per head and 96 rotating channels, as in H3: what the CUDA kernels are written for
TRANSFORMER = {
    "num_attention_heads": 2, "attention_head_dim": 128, "hidden_size": 256, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 512,
    "text_dim": TEXT_WIDTH, "freq_dim": 32, "time_embed_hidden_dim": 64, "time_embed_dim": 32, "rope_freq_dim": 16,
}  # fmt: skip
VIDEO_VAE = {
    "block_out_channels": (8, 8, 8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "decoder_num_layers": 1,
    "decoder_num_attention_heads": 2, "decoder_attention_head_dim": 16, "decoder_num_register_tokens": 1, "decoder_ffn_mult": 2,
}  # fmt: skip
AUDIO_VAE = {
    "encoder_dim": 4, "latent_dim": 64, "num_attention_heads": 2, "decoder_dim": 128,
    "latents_mean": [0.0] * 32, "latents_std": [1.0] * 32,
}  # fmt: skip


def transformer(dtype=torch.bfloat16, seed=0, **changes):
    """``MiniMaxH3Transformer3DModel`` of :data:`TRANSFORMER` with ``changes``; the modules the checkpoint keeps in fp32 stay fp32."""
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = MiniMaxH3Transformer3DModel(**{**TRANSFORMER, **changes})
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" in name:
                torch.nn.init.normal_(weight, 1, 0.1)  # all ones would hide a norm's weight that nobody applied
    kept = tuple(model._keep_in_fp32_modules)
    for name, child in model.named_children():
        if name not in kept:
            child.to(dtype)
    return model.eval().requires_grad_(False)


def tokenizer():
    """``Qwen2Tokenizer`` with one token per byte and the five special tokens that H3's presentation uses."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: index for index, symbol in enumerate((*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS))}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], additional_special_tokens=list(SPECIAL_TOKENS[1:]))


def processor(tokens):
    """``Qwen3VLProcessor`` around ``tokens`` with the image and video processors' own defaults, bounded to small pictures."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    bounds = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
    shape = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=bounds, **shape), tokenizer=tokens,
        video_processor=Qwen3VLVideoProcessor(size={**bounds, "longest_edge": 64 * 64 * 64}, **shape))


def text_encoder(tokens, dtype=torch.bfloat16, seed=0):
    """``Qwen3VLForConditionalGeneration`` of :data:`TEXT_LAYERS` layers of width :data:`TEXT_WIDTH`."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ids = {name: tokens.convert_tokens_to_ids(token) for name, token in (
        ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>"))}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokens), "hidden_size": TEXT_WIDTH, "intermediate_size": 64, "num_hidden_layers": TEXT_LAYERS,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 16, "spatial_merge_size": 2,
        },
        **ids)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config).to(dtype).eval().requires_grad_(False)


def components(references=False, dtype=torch.bfloat16, seed=0) -> dict:
    """The components of ``MiniMaxH3Blocks`` by name; ``references`` picks the partition, ``transformer_ref`` or ``transformer``."""
    from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Scheduler

    tokens = tokenizer()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        vaes = {"vae": AutoencoderKLMiniMaxH3(**VIDEO_VAE), "audio_vae": AutoencoderKLMiniMaxH3Audio(**AUDIO_VAE)}
    return {
        "text_encoder": text_encoder(tokens, dtype, seed), "tokenizer": tokens, "processor": processor(tokens),
        **{name: vae.eval().requires_grad_(False) for name, vae in vaes.items()},
        "scheduler": MiniMaxH3Scheduler(shift=12.0), "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
        "transformer_ref" if references else "transformer": transformer(dtype, seed),
    }  # fmt: skip


def pipeline(references=False, dtype=torch.bfloat16, seed=0, manager=None):
    """``MiniMaxH3ModularPipeline`` over :func:`components`, with reference pictures of 64 pixels and clips of any length."""
    from diffusers.modular_pipelines import MiniMaxH3Blocks, MiniMaxH3ModularPipeline

    class TinyPipeline(MiniMaxH3ModularPipeline):
        min_duration = 0.0  # the released checkpoint was trained from 5 s on; this one was not trained

    made = TinyPipeline(blocks=MiniMaxH3Blocks(), components_manager=manager)
    made.update_components(**components(references, dtype, seed))
    if references:
        made.update_components(reference_image_short_edge=64, canvas_short_edge=64, canvas_max_pixels=64 * 64)
    return made

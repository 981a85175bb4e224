"""Sampling the tiny models in this process, and what the tests of the patch compare."""

import torch


def conditioning(kinds="text", seed=0, tokens=8, size=(64, 64)):
    """Random conditioning for :func:`sample`: ``text``, ``keyframes``, ``references``, or ``all`` (every segment kind, two text tags)."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    states = randn(1, tokens, 5120)
    if kinds == "text":
        return [[states, {}]]
    height, width = size[1] // 16, size[0] // 16
    tags = torch.ones(tokens, dtype=torch.long)
    tags[2:5] = 0
    keyframes = [{"resolved_frame_index": 0, "latent": randn(1, 24, 1, height, width), "audio_latent": randn(1, 32, 2, 3)}]
    references = [
        {"kind": "image", "latent_h": height, "latent_w": width, "latent": randn(1, 24, 1, height, width)},
        {"kind": "audio", "ref_audio_t": 4, "audio_latent": randn(1, 32, 2, 4)},
        {"kind": "video_audio", "latent_t": 2, "latent_h": height, "latent_w": width, "ref_audio_t": 8,
         "latent": randn(1, 24, 2, height, width), "audio_latent": randn(1, 32, 2, 8)},
    ]
    extra = {"minimax_token_tags": tags, "minimax_keyframes": keyframes, "minimax_refs": references}
    if kinds == "keyframes":
        del extra["minimax_refs"]
    elif kinds == "references":
        del extra["minimax_keyframes"]
    return [[states, extra]]


def sample(patcher, positive, steps=4, size=(64, 64, 5), seed=7, sampler="euler", mask=None):
    """The sampled latent, ``[video, audio]``. ``mask``: denoise mask of the video latent, ``[1, 1, T, H, W]``."""
    from comfy_extras.nodes_custom_sampler import BasicGuider, BasicScheduler, KSamplerSelect, RandomNoise, SamplerCustomAdvanced
    from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV

    with torch.inference_mode():
        (latent,) = EmptyMiniMaxH3LatentAV.execute(*size).result
        if mask is not None:
            latent["noise_mask"] = mask
        (guider,) = BasicGuider.execute(patcher, positive).result
        (sigmas,) = BasicScheduler.execute(patcher, "simple", steps, 1.0).result
        (noise,) = RandomNoise.execute(seed).result
        (chosen,) = KSamplerSelect.execute(sampler).result
        finished = SamplerCustomAdvanced.execute(noise, guider, chosen, sigmas, latent).result[0]
    return [stream.clone() for stream in finished["samples"].unbind()]


def same(a, b):
    """Byte equality of two lists of tensors."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a, b, strict=True))


def fused(report, op):
    """Fused calls of one op, over all backends."""
    return sum(report["ops"].get(op, {"fused": {}})["fused"].values())


def fused_forms(report, op):
    """Fused calls of an op and of its forms that quantise what they make."""
    return sum(fused(report, op + form) for form in ("", "_nvfp4", "_int8"))


def stock(report, op):
    """Reasons for which an op's stock call ran."""
    return report["ops"].get(op, {"stock": {}})["stock"]

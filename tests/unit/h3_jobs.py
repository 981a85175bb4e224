"""Packed sequences of every kind of conditioning, as diffusers' own pipeline lays them out, for a small transformer."""

from types import SimpleNamespace

import torch

PATCH, CHANNELS, AUDIO_TAG, VIDEO_TAG, TEXT_TAG = (1, 2, 2), 2, 2, 0, 1
# target: latent frames, height, width, sound latents per channel
TARGET = (7, 4, 6, 37)
KEYFRAMES = {"text": (), "first frame": ("first",), "last frame": ("last",), "both frames": ("first", "last")}
# kind -> (video latents (t, h, w) or None, sound latents per channel or 0)
REFERENCES = {
    "picture": [("image", (1, 6, 4), 0)],
    "picture and sound": [("image", (1, 4, 4), 0), ("audio", None, 11)],
    "video with sound": [("video", (7, 4, 8), 20)],
    "everything": [("audio", None, 5), ("image", (1, 2, 2), 0), ("video", (2, 4, 4), 0), ("video", (7, 2, 6), 12)],
}
KINDS = [*KEYFRAMES, *REFERENCES]


def text_tags(kind):
    """Modality of the text rows: a vision block of three rows in the middle where there are pictures."""
    tags = torch.full((10,), TEXT_TAG)  # an even number of rows in all, which two ranks can share
    if kind != "text":
        tags[3:6] = VIDEO_TAG
    return tags


def layout(kind):
    """(positions, tags, video rows, sound rows, text rows, leading condition rows of video, of sound) from diffusers."""
    from diffusers.modular_pipelines.minimax_h3 import before_denoise

    t, h, w, sound = TARGET
    if kind in KEYFRAMES:
        return before_denoise.MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            text_tags(kind), t, h, w, sound, PATCH, CHANNELS, AUDIO_TAG, VIDEO_TAG, KEYFRAMES[kind])
    entries = REFERENCES[kind]
    references = [SimpleNamespace(kind=name, has_audio=rows > 0) for name, _, rows in entries]
    return before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        text_tags(kind), references, [torch.empty(1, 24, *shape) for _, shape, _ in entries if shape],
        [torch.empty(rows * CHANNELS, 32) for _, _, rows in entries if rows], t, h, w, sound, PATCH, CHANNELS, AUDIO_TAG, VIDEO_TAG)


def arguments(kind, transformer, seed=1, text_dtype=torch.bfloat16):
    """Arguments of ``transformer.forward`` at video t 0.3, sound t 0.7, pictures 0.999 and reference sounds 1."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3SetTimestepsStep

    positions, tags, video, sound, text, video_conditions, sound_conditions = layout(kind)
    timesteps, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, sound, video_conditions, sound_conditions, len(text), 0.3, 0.7, 0.999, 1.0)
    generator, config = torch.Generator().manual_seed(seed), transformer.config
    return {
        "hidden_states": torch.randn(1, len(video), config.in_channels * 4, generator=generator),
        "audio_hidden_states": torch.randn(1, len(sound), config.audio_in_channels, generator=generator),
        "encoder_hidden_states": torch.randn(1, len(text), config.text_dim, generator=generator).to(text_dtype),
        "timestep": timesteps, "timestep_indices": indices, "token_tags": tags, "position_ids": positions,
        "video_indices": video, "audio_indices": sound, "text_indices": text, "return_dict": False,
    }

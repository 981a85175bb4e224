"""What may be connected to an input: each check names the input, what came, and the way out."""

import comfy.model_base
from comfy.nested_tensor import NestedTensor
from comfy.text_encoders.minimax import MiniMaxH3Tokenizer

from ..h3 import grid


def connected(node, name, value, source):
    if value is None:
        raise ValueError(f"{node}: nothing is connected to '{name}': connect {source}")
    return value


def h3_model(node, name, model):
    connected(node, name, model, "the model of H3 Load")
    if not isinstance(model.model, comfy.model_base.MiniMaxH3):
        raise ValueError(f"{node}: the model on '{name}' is {type(model.model).__name__}, not MiniMax H3: load an H3 diffusion model")


def text_encoder(node, name, clip):
    connected(node, name, clip, "the text encoder of H3 Load, or of Load CLIP with type minimax")
    if not isinstance(clip.tokenizer, MiniMaxH3Tokenizer):
        raise ValueError(
            f"{node}: the text encoder on '{name}' has a {type(clip.tokenizer).__name__}, H3 needs its Qwen3-VL 32B cut to "
            "50 layers: load that file, in Load CLIP with type minimax"
        )


def _vae_name(vae):
    if vae.latent_channels == grid.AUDIO_CHANNELS and vae.latent_dim == 2:
        return "an H3 audio VAE"
    if vae.latent_channels == grid.VIDEO_CHANNELS and vae.latent_dim == 3:
        return "an H3 video VAE"
    return f"{type(vae.first_stage_model).__name__}, a VAE of another model ({vae.latent_channels} latent channels)"


def video_vae(node, name, vae):
    connected(node, name, vae, "the video VAE of H3 Load")
    if _vae_name(vae) != "an H3 video VAE":
        raise ValueError(f"{node}: '{name}' takes the H3 video VAE, but it got {_vae_name(vae)}")


def audio_vae(node, name, vae):
    connected(node, name, vae, "the audio VAE of H3 Load")
    if _vae_name(vae) != "an H3 audio VAE":
        raise ValueError(f"{node}: '{name}' takes the H3 audio VAE, but it got {_vae_name(vae)}")


def h3_latent(node, name, latent):
    """The (video, audio) tensors of an H3 latent."""
    samples = connected(node, name, latent, "the latent of H3 Conditioning")["samples"]
    streams = samples.unbind() if isinstance(samples, NestedTensor) else [samples]
    fault = grid.latent_fault([stream.shape for stream in streams])
    if fault:
        raise ValueError(
            f"{node}: the latent on '{name}' is not a MiniMax H3 latent: {fault}. Make it with H3 Conditioning or with "
            "Empty MiniMax H3 AV Latent"
        )
    return tuple(streams)


def batch_of_one(node, name, video):
    if video.shape[0] != 1:
        raise ValueError(
            f"{node}: the latent on '{name}' is a batch of {video.shape[0]}; H3 makes one clip at a time: queue the "
            f"workflow {video.shape[0]} times with other seeds"
        )

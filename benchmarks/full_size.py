"""ComfyUI's own, unmodified MiniMax H3 model with random weights, at any size, behind a real ModelPatcher.

Everything between the weights and the kernels is ComfyUI's: detection, operations, loading, the patcher, the samplers. So a
wrapper on a clone of the patcher applies here as it does in a workflow.

Weights are drawn per tensor from a generator seeded with its name: models of one seed hold the same values, before quantising.
"""

import contextlib
import gc
import json
import logging
import zlib
from dataclasses import dataclass

import torch

from ..h3 import tiny
from .shapes import AUDIO_CHANNELS, LATENT_CHANNELS

WEIGHTS = ("bf16", "int8", "nvfp4")
ATTENTIONS = ("fa2", "cudnn", "kitchen", "sage")
# The Linears that quantised checkpoints hold quantised, and the group size of INT8-ConvRot.
QUANTISED, CONVROT_GROUP = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"), 256


# ------------------------------------------------------------------------------------------------------------- weights
def _draw(name, shape, dtype, device, seed):
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if name == "rope.inv_freq":
        steps = torch.arange(shape[0], dtype=torch.float32, device=device)
        return tensor.copy_(10000.0 ** (-steps / shape[0]))
    if name == "adaln_t_table":
        return tensor.normal_(0, 1, generator=generator)
    if len(shape) == 1 and "norm" in name:
        # Around one but not one: a kernel that forgot the norm's weight must not pass.
        return tensor.normal_(1, 0.1, generator=generator)
    if name.endswith("patch_proj.weight"):
        return tensor.normal_(0, shape[1] ** -0.5, generator=generator)
    return tensor.normal_(0, 0.02, generator=generator)


def state_dict(comfy, model, weights, device, seed=0):
    """A checkpoint of ``model`` (:class:`shapes.Model`) on ``device``.

    ``weights``: ``bf16``; ``int8`` for INT8-ConvRot as the official files are laid out (``weight`` int8,
    ``weight_scale`` fp32 per output row, ``comfy_quant``); ``nvfp4``, whose products are W4A4 where the GPU has FP4 tensor cores and
    run in full precision elsewhere. Names and dtypes come from ComfyUI's model itself.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"unknown weights {weights!r}: use {', '.join(WEIGHTS)}")
    skeleton = comfy.minimax.MiniMaxH3Model(
        hidden_size=model.hidden,
        num_layers=model.blocks,
        token_refiner_num_layers=model.refiner_blocks,
        num_attention_heads=model.heads,
        attention_head_dim=model.head_dim,
        ffn_hidden_size=model.ffn,
        text_dim=model.text_dim,
        adaln_curve_grid=model.curve[0],
        time_embed_dim=model.curve[1],
        rope_inv_freq_len=model.inv_freq,
        dtype=torch.bfloat16,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    note = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": CONVROT_GROUP})
    layout = comfy.quant_ops.TensorWiseINT8Layout
    checkpoint = {}
    for name, like in skeleton.state_dict().items():
        tensor = _draw(name, like.shape, like.dtype, device, seed)
        layer = name.removesuffix(".weight")
        if weights == "bf16" or not name.startswith("blocks.") or not layer.endswith(QUANTISED) or layer == name:
            checkpoint[name] = tensor
        elif weights == "nvfp4":
            checkpoint |= {f"{layer}.{suffix}": part for suffix, part in tiny.nvfp4(tensor).items()}
        else:
            data, params = layout.quantize(tensor, per_channel=True, convrot=True, convrot_groupsize=CONVROT_GROUP)
            checkpoint[name] = data
            checkpoint[f"{layer}.weight_scale"] = params.scale.float()
            # ComfyUI reads the note with numpy, so it stays on the CPU.
            checkpoint[f"{layer}.comfy_quant"] = torch.tensor(list(note.encode()), dtype=torch.uint8)
    return checkpoint


def build(comfy, model, weights, device, seed=0):
    """A ``ModelPatcher`` around ComfyUI's ``model_base.MiniMaxH3`` with random weights, resident on ``device``.

    Goes through ``comfy.sd.load_diffusion_model_state_dict``. Raises RuntimeError when ComfyUI does not take the
    checkpoint, or leaves a parameter unset.
    """
    checkpoint = state_dict(comfy, model, weights, device, seed)
    # Creating 40 GB of parameters on the CPU first, as ComfyUI does for a file, would only cost time here.
    place = torch.device(device) if device.type == "cuda" else contextlib.nullcontext()
    problems = _Warnings()
    logging.getLogger().addHandler(problems)
    try:
        with place:
            patcher = comfy.sd.load_diffusion_model_state_dict(checkpoint, disable_dynamic=True)
    finally:
        logging.getLogger().removeHandler(problems)
    if patcher is None:
        raise RuntimeError("ComfyUI did not recognise the random checkpoint as MiniMax H3")
    if problems.messages:
        raise RuntimeError(f"ComfyUI did not take the random checkpoint whole: {problems.messages}")
    del checkpoint
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    return patcher


class _Warnings(logging.Handler):
    """Keeps the loader's "unet missing" and "unet unexpected" lines, which ComfyUI only logs."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        if "unet missing" in record.getMessage() or "unet unexpected" in record.getMessage():
            self.messages.append(record.getMessage()[:500])


def release():
    """Give unreferenced weights back to the device; drop the patcher and all its clones first."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ----------------------------------------------------------------------------------------------------------- attention
def attention_missing(comfy, name, device):
    """None when attention ``name`` can run here, else why not, in words. Raises ValueError for an unknown name."""
    if name not in ATTENTIONS:
        raise ValueError(f"unknown attention {name!r}: use {', '.join(ATTENTIONS)}")
    if name == "fa2":
        return None  # ComfyUI's default, whatever that is on this device
    if device.type != "cuda":
        return "needs a CUDA device"
    if name == "cudnn" and not hasattr(comfy.ops, "SDPA_BACKEND_PRIORITY"):
        return "needs a torch whose sdpa_kernel takes set_priority"
    key = {"kitchen": "comfy_kitchen_int8", "sage": "sage"}.get(name)
    if key and comfy.attention.get_attention_function(key, None) is None:
        return f"ComfyUI has no attention function {key!r} here (is the package installed?)"
    return None


def with_attention(comfy, patcher, name):
    """A patcher that uses attention ``name`` as ComfyUI's Model Attention Backend node sets it: a clone, or ``patcher``.

    ``fa2`` is the default (SDPA, FlashAttention first); ``cudnn`` is SDPA too and is chosen by :func:`sdpa_order`.
    """
    key = {"kitchen": "comfy_kitchen_int8", "sage": "sage"}.get(name)
    if key is None:
        return patcher
    clone = patcher.clone()
    clone.set_model_optimized_attention(comfy.attention.get_attention_function(key))
    return clone


@contextlib.contextmanager
def sdpa_order(comfy, name):
    """ComfyUI's SDPA order with cuDNN alone while the block runs, when ``name`` is ``cudnn``; else unchanged."""
    if name != "cudnn":
        yield
        return
    from torch.nn.attention import SDPBackend

    order = comfy.ops.SDPA_BACKEND_PRIORITY
    before = list(order)
    order[:] = [SDPBackend.CUDNN_ATTENTION]
    try:
        yield
    finally:
        order[:] = before


def attention_name(comfy, name, device):
    """What attention ``name`` really is here, for the result: the function, and the SDPA order behind it."""
    if name in ("kitchen", "sage"):
        return comfy.attention.get_attention_function({"kitchen": "comfy_kitchen_int8", "sage": "sage"}[name]).__name__
    function = comfy.minimax.optimized_attention.__name__
    if device.type != "cuda":
        return function
    with sdpa_order(comfy, name):
        order = [str(backend).rsplit(".", 1)[-1] for backend in getattr(comfy.ops, "SDPA_BACKEND_PRIORITY", [])]
    return f"{function}: {', '.join(order)}"


# ------------------------------------------------------------------------------------------------------------ one step
@dataclass(frozen=True)
class Inputs:
    """What one denoiser forward gets. ``context`` is refined already, as ComfyUI hands it over."""

    video: torch.Tensor  # [1, 24, t, h, w], compute dtype
    audio: torch.Tensor  # [1, 32, 2, frames], compute dtype
    context: torch.Tensor  # [1, tokens, hidden], compute dtype
    timestep: torch.Tensor  # [1] fp32, 1000 x sigma
    payload: dict


def make_inputs(comfy, patcher, job, device, seed=1):
    """Random :class:`Inputs` of ``job`` for the model of ``patcher``, at sigma 0.5."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = patcher.model.get_dtype_inference()

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    layout = comfy.minimax.PackedLayout(job.text, *job.latent, job.audio)
    if layout.seq_len != job.rows:
        raise RuntimeError(f"job {job.name}: shapes.py counts {job.rows} rows, ComfyUI packs {layout.seq_len}")
    return Inputs(
        video=draw(1, LATENT_CHANNELS, *job.latent),
        audio=draw(1, AUDIO_CHANNELS, 2, job.audio),
        context=draw(1, job.text, patcher.model.diffusion_model.hidden_size),
        timestep=torch.full((1,), 500.0, device=device),
        payload={"layout": layout, "seed": 0, "audio_scale": 1.0},
    )


def transformer_options(comfy, patcher):
    """The options one forward gets from ``patcher``: its own, with the wrappers and callbacks that a sampler merges in."""
    options = comfy.model_patcher.create_model_options_clone(patcher.model_options)["transformer_options"]
    for name in ("wrappers", "callbacks"):
        comfy.patcher_extension.merge_nested_dicts(
            options.setdefault(name, {}), getattr(patcher, name), copy_dict1=False
        )
    options["prefetch_dynamic_vbars"] = False
    return options


@contextlib.contextmanager
def session(comfy, patcher, inputs, attention="fa2"):
    """What a sampler does around its steps; yields ``step() -> [video, audio]``, one denoiser forward through ``patcher``.

    Loads the patcher, calls its pre-run hooks, sets the SDPA order; afterwards calls its clean-up hooks.
    """
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    patcher.pre_run()
    options = transformer_options(comfy, patcher)

    def step():
        return patcher.model.diffusion_model(
            [inputs.video, inputs.audio],
            inputs.timestep,
            context=inputs.context,
            control=None,
            transformer_options=options,
            minimax_payload=inputs.payload,
        )

    try:
        with sdpa_order(comfy, attention):
            yield step
    finally:
        patcher.cleanup()


def run_step(comfy, patcher, inputs, attention="fa2"):
    """One denoiser forward; returns [video, audio] velocities."""
    with session(comfy, patcher, inputs, attention) as step:
        return step()


# ---------------------------------------------------------------------------------------------------------- trajectory
def run_trajectory(comfy, patcher, job, steps, attention="fa2", seed=1, on_step=None):
    """Sample ``job`` for ``steps`` Euler steps through ComfyUI's guider, as a workflow without CFG does.

    The schedule is ``simple`` on the model's own sigmas; the audio stream runs on its own shifted clock inside the model.

    Args:
        on_step: ``on_step(index, [video, audio])`` gets each step's prediction of the clean latents.

    Returns:
        [video, audio] latents, fp32.
    """
    device = patcher.load_device
    hidden = torch.Generator().manual_seed(seed)
    text_dim = patcher.model.diffusion_model.condition_proj.in_features
    context = torch.randn(1, job.text, text_dim, generator=hidden)
    latent = comfy.nested_tensor.NestedTensor((
        torch.zeros(1, LATENT_CHANNELS, *job.latent),
        torch.zeros(1, AUDIO_CHANNELS, 2, job.audio),
    ))
    guider = comfy.samplers.CFGGuider(patcher)
    guider.inner_set_conds({"positive": [[context, {}]]})
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", steps)

    def callback(index, denoised, latents, total):
        if on_step is not None:
            on_step(index, list(denoised.unbind()))

    with sdpa_order(comfy, attention):
        out = guider.sample(
            comfy.sample.prepare_noise(latent, seed), latent, comfy.samplers.sampler_object("euler"), sigmas,
            callback=callback, disable_pbar=True, seed=seed,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return list(out.unbind())

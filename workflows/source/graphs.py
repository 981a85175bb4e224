"""The bundled workflows, described once. After a change here, or to a node's inputs, write the files anew:

    H3_WRITE_WORKFLOWS=1 .venv/bin/pytest tests/host/test_workflows.py -k up_to_date
"""

from .canvas import Link, Node, Workflow

HUB = "https://huggingface.co/Comfy-Org/MiniMax-H3/resolve/main"
FL2VA = "minimax_h3_fl2va_pruned_int8_convrot.safetensors"
REF2VA = "minimax_h3_ref2va_pruned_int8_convrot.safetensors"
TEXT_ENCODER = "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors"
VIDEO_VAE = "minimax_h3_video_vae_int8_convrot.safetensors"
AUDIO_VAE = "minimax_h3_audio_vae_fp32.safetensors"
TURBO_4 = "minimax_h3_fl2v_turbo_4step_v1.0_768p_comfyui_bf16.safetensors"
TURBO_8 = "minimax_h3_fl2v_turbo_8step_v1.0_comfyui_bf16.safetensors"
PREVIEW, FINAL = (864, 480), (1344, 768)
SECONDS, FRAMES = 5.2, 124  # 124 frames are 5.17 seconds
LONG_SECONDS, LONG_FRAMES = 15.1, 362

SIZES = """\
**Size and length.** The workflow starts at {width} x {height}. Width and height are multiples of 32:

| | width | height |
|---|---|---|
| preview | 864 | 480 |
| final | 1344 | 768 |
| square | 768 | 768 |
| upright | 768 | 1344 |

`seconds` picks the nearest length that H3 can make (5, 22, 39, .. 17k + 5 frames at 24 a second); at 0, `frames` counts. H3 was trained on
clips of 5 to 15 seconds.
"""
SEED = "**Seed.** A new one for every queued job. To get the same clip again set *control after generate* to *fixed*.\n"
SPEED = """\
**H3 Accelerate** changes no byte of the result. After a run it shows which kernels ran. Bypass it (Ctrl+B) to compare.
"""
PROMPTING = "Describe the shot, the camera, and the sound (speech in quotes, noises, music) in one text.\n"


def _model(name, folder, url=None):
    return {"name": name, "url": url or f"{HUB}/{folder}/{name}", "directory": folder}


def _models_note(*models):
    rows = [f"- `models/{m['directory']}`: [{m['name']}]({m['url']})" for m in models]
    return (
        "Put these files into the folders of ComfyUI, then press R:\n\n" + "\n".join(rows) + "\n\n"
        "Other forms of them (bf16, fp8, NVFP4, full or pruned) load as well: choose them in H3 Load.\n\n"
        "No H3 Vortex nodes in the menu? The pack needs ComfyUI 0.33.0 or newer.\n"
    )


def _files(diffusion_model):
    return (
        _model(diffusion_model, "diffusion_models"), _model(TEXT_ENCODER, "text_encoders"), _model(VIDEO_VAE, "vae"),
        _model(AUDIO_VAE, "vae"),
    )  # fmt: skip


def _load(diffusion_model):
    chosen = {"diffusion_model": diffusion_model, "text_encoder": TEXT_ENCODER, "video_vae": VIDEO_VAE, "audio_vae": AUDIO_VAE}
    return Node("H3VortexLoad", chosen, models=_files(diffusion_model))


def _conditioning(prompt, size=PREVIEW, seconds=SECONDS, frames=FRAMES, **more):
    return Node(
        "H3VortexConditioning",
        {"clip": Link("load", 1), "prompt": prompt, "width": size[0], "height": size[1], "frames": frames, "seconds": seconds, **more},
    )


def _result(name, latent="denoise"):
    return {
        "decode": Node("H3VortexDecode", {"vae": Link("load", 2), "audio_vae": Link("load", 3), "latent": Link(latent)}),
        "save": Node("SaveVideo", {"video": Link("decode", 2), "filename_prefix": f"video/h3_{name}"}),
    }


def _base(
    name, note, prompt, *, diffusion_model=FL2VA, inputs=None, lora=None, size=PREVIEW, seconds=SECONDS, frames=FRAMES, **more
):  # fmt: skip
    """Load, condition, accelerate, sample, decode, save; with ``inputs`` (key -> Node) in front of the conditioning and ``lora``."""
    nodes = {"load": _load(diffusion_model), "conditioning": _conditioning(prompt, size, seconds, frames, **more)}
    models, model = _files(diffusion_model), Link("load")
    if lora:
        models = (*models, lora)
        nodes["turbo"] = Node("H3VortexTurboLora", {"model": model, "lora": lora["name"]}, models=(lora,))
        model = Link("turbo")
    nodes["accelerate"] = Node("H3VortexAccelerate", {"model": model})
    nodes |= inputs or {}
    if lora:
        sampler, sigmas, model = Link("turbo", 2), Link("turbo", 1), Link("accelerate")
    else:
        nodes["sampler"] = Node("H3VortexSampler", {"model": Link("accelerate")})
        sampler, sigmas, model = Link("sampler"), Link("sampler", 1), Link("sampler", 2)
    nodes["denoise"] = Node(
        "H3VortexDenoise",
        {
            "model": model, "positive": Link("conditioning"), "latent": Link("conditioning", 1), "sampler": sampler, "sigmas": sigmas,
            "seed": 42,
        },
    )
    nodes |= _result(name)
    columns = [
        [("1. Models", [["load"]]), *([("2. Your files", [list(inputs)])] if inputs else [])],
        [
            ("Speed", [[key] for key in ("turbo", "accelerate") if key in nodes]),
            ("3. What to make" if inputs else "2. What to make", [["conditioning"]]),
        ],
        [("Sampling", [[key] for key in ("sampler", "denoise") if key in nodes])],
        [("Frames, sound and file", [["decode"], ["save"]])],
    ]
    full = f"{note}\n{PROMPTING}\n{SIZES.format(width=size[0], height=size[1])}\n{SEED}\n{SPEED}"
    return Workflow(name, nodes, columns, full, _models_note(*models))


def _image(title):
    return Node("LoadImage", {"image": "example.png"}, title)


def _stock_graph(prompt):
    """Core's nodes as the official text-to-video template wires them."""
    return {
        "unet": Node("UNETLoader", {"unet_name": FL2VA}, models=(_model(FL2VA, "diffusion_models"),)),
        "clip": Node("CLIPLoader", {"clip_name": TEXT_ENCODER, "type": "minimax"}, models=(_model(TEXT_ENCODER, "text_encoders"),)),
        "vae": Node("VAELoader", {"vae_name": VIDEO_VAE}, "Load VAE (video)", (_model(VIDEO_VAE, "vae"),)),
        "audio_vae": Node("VAELoader", {"vae_name": AUDIO_VAE}, "Load VAE (sound)", (_model(AUDIO_VAE, "vae"),)),
        "accelerate": Node("H3VortexAccelerate", {"model": Link("unet")}),
        "conditioning": Node(
            "MiniMaxH3ImageToVideo",
            {"clip": Link("clip"), "vae": Link("vae"), "prompt": prompt, "width": PREVIEW[0], "height": PREVIEW[1], "length": FRAMES},
        ),
        "guider": Node("BasicGuider", {"model": Link("accelerate"), "conditioning": Link("conditioning")}),
        "sampler": Node("KSamplerSelect", {"sampler_name": "res_multistep"}),
        "sigmas": Node("BasicScheduler", {"model": Link("accelerate"), "scheduler": "simple", "steps": 20}),
        "noise": Node("RandomNoise", {"noise_seed": 42}),
        "sample": Node(
            "SamplerCustomAdvanced",
            {
                "noise": Link("noise"), "guider": Link("guider"), "sampler": Link("sampler"), "sigmas": Link("sigmas"),
                "latent_image": Link("conditioning", 1),
            },
        ),
        "frames": Node("VAEDecode", {"samples": Link("sample"), "vae": Link("vae")}),
        "sound": Node("VAEDecodeAudio", {"samples": Link("sample"), "vae": Link("audio_vae")}),
        "movie": Node("CreateVideo", {"images": Link("frames"), "audio": Link("sound"), "fps": 24.0}),
        "save": Node("SaveVideo", {"video": Link("movie"), "filename_prefix": "video/h3_accelerated_stock"}),
    }  # fmt: skip


def _accelerate_stock():
    note = """\
ComfyUI's own text-to-video graph for H3 and one node more: **H3 Accelerate**, between the model loader and everything that takes the model.

Do the same in a workflow of yours: connect *model* of the loader (or of the last LoRA) to H3 Accelerate, and H3 Accelerate to the guider
and to the scheduler. Frames and sound stay the same, byte for byte.

After a run H3 Accelerate shows which kernels ran, which did not, and why.
"""
    columns = [
        [("1. Models", [["unet", "clip", "vae", "audio_vae"]])],
        [("The one node", [["accelerate"]]), ("2. What to make", [["conditioning"]])],
        [("Sampling", [["noise", "guider", "sampler", "sigmas"], ["sample"]])],
        [("Frames, sound and file", [["frames", "sound"], ["movie"], ["save"]])],
    ]
    prompt = "A steam train crosses a stone viaduct at dawn, mist in the valley. The whistle echoes, wheels click on the rails."
    nodes = _stock_graph(prompt)
    return Workflow("accelerate_stock_workflow", nodes, columns, note, _models_note(*_files(FL2VA)))


def _compare():
    note = """\
The same model, prompt and noise twice: once as ComfyUI runs it, once through **H3 Accelerate**. *Same video?* and *Same sound?* compare the
SHA-256 of the two finished latents and show **True** when every byte is the same. The two run records show the time of every step.

The first run also compiles and verifies the kernels. For the times take the second run: queue twice with another seed.

Only the accelerated latent is decoded: the same bytes give the same film.
"""
    prompt = "A potter shapes a bowl on a turning wheel, close up, warm window light. Wet clay hisses softly under the fingers."
    common = {"positive": Link("conditioning"), "latent": Link("conditioning", 1), "noise": Link("noise")}
    sampler = {"sampler": Link("sampler"), "sigmas": Link("sampler", 1)}

    def digest(source, stream, side):
        return Node(
            "RegexExtract",
            {
                "string": Link(source, 1), "mode": "First Group", "regex_pattern": f'"{stream}_sha256": *"([0-9a-f]+)"',
            },
            f"{stream.title()} latent's SHA-256, {side}", height=300,
        )  # fmt: skip

    def same(stream):
        compared = {"string_a": Link(f"{stream}_stock"), "string_b": Link(f"{stream}_fast"), "mode": "Equal"}
        return Node("StringCompare", compared, f"Compare {stream}", height=220)

    nodes = {
        "load": _load(FL2VA),
        "conditioning": _conditioning(prompt),
        "accelerate": Node("H3VortexAccelerate", {"model": Link("load")}),
        "noise": Node("RandomNoise", {"noise_seed": 42}, "Noise for both"),
        "sampler": Node("H3VortexSampler", {"model": Link("load")}, "H3 Sampler for both"),
        "stock": Node("H3VortexDenoise", {"model": Link("load"), **common, **sampler}, "Stock"),
        "fast": Node("H3VortexDenoise", {"model": Link("accelerate"), **common, **sampler}, "Accelerated"),
        **{
            f"{stream}_{key}": digest(source, stream, side)
            for stream in ("video", "audio")
            for key, source, side in (("stock", "stock", "stock"), ("fast", "fast", "accelerated"))
        },
        "compare_video": same("video"),
        "compare_audio": same("audio"),
        "video_same": Node("PreviewAny", {"source": Link("compare_video")}, "Same video?"),
        "audio_same": Node("PreviewAny", {"source": Link("compare_audio")}, "Same sound?"),
        **_result("compare", "fast"),
    }
    columns = [
        [("1. Models", [["load"]]), ("2. What to make", [["conditioning"]])],
        [("For both", [["sampler", "noise"]])],
        [("Stock", [["stock"]]), ("Accelerated", [["accelerate"], ["fast"]]), ("Frames, sound and file", [["decode"], ["save"]])],
        [
            ("The same video?", [["video_stock", "video_fast"], ["compare_video"], ["video_same"]]),
            ("The same sound?", [["audio_stock", "audio_fast"], ["compare_audio"], ["audio_same"]]),
        ],
    ]
    note = f"{note}\n{SIZES.format(width=PREVIEW[0], height=PREVIEW[1])}"
    return Workflow("compare_stock_and_accelerated", nodes, columns, note, _models_note(*_files(FL2VA)))


WORKFLOWS = (
    _base(
        "text_to_video",
        "A video with sound from a text.\n",
        "A red fox trots through fresh snow at the edge of a pine forest, low morning sun, slow tracking shot. "
        "Snow crunches under its paws, a raven calls far away.",
    ),
    _base(
        "first_frame_to_video",
        "A video that begins with your image. Choose it in **First frame**. "
        "It is stretched to the clip's size, so take one of the same shape.\n",
        "The scene of the first frame comes alive: a gentle breeze moves everything that can move, the camera pushes in slowly. "
        "Soft wind, distant birds.",
        inputs={"first": _image("First frame")},
        vae=Link("load", 2),
        first_frame=Link("first"),
    ),
    _base(
        "first_last_frame_to_video",
        "A video that begins with one image and ends with another. Choose both; the text says what happens between them.\n",
        "One continuous shot: day turns into night, lamps light up one after the other, the camera stays still. Crickets begin to chirp.",
        inputs={"first": _image("First frame"), "last": _image("Last frame")},
        vae=Link("load", 2),
        first_frame=Link("first"),
        last_frame=Link("last"),
    ),
    _base(
        "reference_image",
        "A video with a person, a thing or a style from an image. In the text it is `<Picture 1>`. "
        "For a second one connect *ref_image_1*: it is `<Picture 2>`. References need the **ref2va** model.\n",
        "<Picture 1> stands on a windy cliff above the sea, turns to the camera and smiles. Waves roar below.",
        diffusion_model=REF2VA,
        inputs={"picture": _image("Reference image: <Picture 1>")},
        vae=Link("load", 2),
        **{"ref_images.ref_image_0": Link("picture")},
    ),
    _base(
        "reference_image_and_voice",
        "A video with a person from an image and a voice from a sound file. In the text they are `<Picture 1>` and `<Audio 1>`. "
        "References need the **ref2va** model. Choose your file in **Reference voice**.\n",
        '<Picture 1> looks into the camera and says with the voice of <Audio 1>: "Good morning, the coffee is ready."',
        diffusion_model=REF2VA,
        inputs={
            "picture": _image("Reference image: <Picture 1>"),
            "voice": Node("LoadAudio", {"audio": "voice.mp3"}, "Reference voice: <Audio 1>"),
        },
        vae=Link("load", 2),
        audio_vae=Link("load", 3),
        **{"ref_images.ref_image_0": Link("picture"), "ref_audios.ref_audio_0": Link("voice")},
    ),
    _base(
        "reference_video",
        "A video with the motion, the camera or the look of another video, and with its sound. In the text it is `<Video 1>`. "
        "References need the **ref2va** model. Take 2 to 15 seconds at 24 frames a second, and choose the file in **Reference video**.\n",
        "Same camera move as <Video 1>, but the street is a market in an old harbour town at night. Lively voices, a street organ.",
        diffusion_model=REF2VA,
        inputs={
            "clip": Node("LoadVideo", {"file": "reference.mp4"}, "Reference video: <Video 1>"),
            "parts": Node("GetVideoComponents", {"video": Link("clip")}),
        },
        vae=Link("load", 2),
        audio_vae=Link("load", 3),
        **{"ref_videos.ref_video_0": Link("parts"), "ref_video_audios.ref_video_audio_0": Link("parts", 1)},
    ),
    _base(
        "turbo_4_steps",
        "4 steps instead of 20 with a Turbo LoRA made for 768p. **H3 Turbo LoRA** reads steps, shifts and sampler from the file and gives "
        "them to the denoiser. Four steps can leave the sound rough: the 8-step workflow is cleaner.\n",
        "A street musician plays the accordion under a stone arch in light rain, people with umbrellas pass by. "
        "A slow waltz, rain on cobbles.",
        lora=_model(TURBO_4, "loras"),
        size=FINAL,
    ),
    _base(
        "turbo_8_steps",
        "8 steps instead of 20 with a Turbo LoRA. **H3 Turbo LoRA** reads steps, shifts and sampler from the file and gives them to "
        "the denoiser.\n",
        "A street musician plays the accordion under a stone arch in light rain, people with umbrellas pass by. "
        "A slow waltz, rain on cobbles.",
        lora=_model(TURBO_8, "loras"),
    ),
    _base(
        "long_clip_15_seconds",
        "The longest clip H3 was trained on: 362 frames, 15.1 seconds. "
        "It takes about three times the rows of a 5 second clip in every step, "
        "and attention grows with their square. Try the prompt with a short clip first.\n",
        "One continuous aerial shot: over a sleeping village at first light, along the river, up the valley to a waterfall. "
        "Church bells, rushing water that grows louder, birds.",
        seconds=LONG_SECONDS,
        frames=LONG_FRAMES,
    ),
    _accelerate_stock(),
    _compare(),
)

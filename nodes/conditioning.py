"""H3 Conditioning: prompt, frames or references, and size, to what the sampler needs."""

import logging

from comfy_api.latest import io
from comfy_extras.nodes_minimax_h3 import MiniMaxH3AddGuide, MiniMaxH3ImageToVideo, MiniMaxH3ReferenceToVideo

from ..h3 import grid
from . import checks, host

log = logging.getLogger("h3_vortex")

NODE = "H3 Conditioning"
REFERENCE_IMAGES, REFERENCE_CLIPS = 9, 3  # core's limits


class H3VortexConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        def several(name, item, tooltip, limit):
            # the names inside are core's: its node pairs ref_video_N with ref_video_audio_N by them
            template = io.Autogrow.TemplatePrefix(input=item, prefix=name.removesuffix("s") + "_", min=0, max=limit)
            return io.Autogrow.Input(name, optional=True, template=template, tooltip=tooltip)

        return io.Schema(
            node_id="H3VortexConditioning",
            display_name="H3 Conditioning",
            category="H3 Vortex",
            description="Text, and if you like first and last frames, a guide, or references, to conditioning and an empty "
            "latent of the right size. Sizes that H3 cannot make are refused with the nearest ones it can.",
            search_aliases=["minimax", "h3", "text to video", "image to video", "reference to video"],
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder of H3 Load."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="What to make. With references, name them <Picture 1>, <Video 1>, <Audio 1>.",
                ),
                io.Int.Input("width", default=1344, min=32, max=grid.MAX_SIZE, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", default=768, min=32, max=grid.MAX_SIZE, step=32, tooltip="Pixels, a multiple of 32."),
                io.Int.Input(
                    "frames",
                    default=124,
                    min=grid.FRAME_OFFSET,
                    max=grid.MAX_FRAMES,
                    step=grid.FRAME_STEP,
                    tooltip="Frames at 24 a second: 5, 22, 39, .. (17k+5). H3 was trained on about 124 to 362.",
                ),
                io.Float.Input(
                    "seconds",
                    default=0.0,
                    min=0.0,
                    max=149.0,
                    step=0.1,
                    tooltip="Above 0: this length, to the nearest frame count that H3 can make, in place of 'frames'.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="The video VAE of H3 Load: needed for frames, guides, references."),
                io.Vae.Input("audio_vae", optional=True, tooltip="The audio VAE of H3 Load: needed for sound that goes in."),
                io.Image.Input("first_frame", optional=True, tooltip="The clip begins with this image, stretched to its size."),
                io.Image.Input("last_frame", optional=True, tooltip="The clip ends with this image, cropped to its shape."),
                io.Image.Input(
                    "guide_image",
                    optional=True,
                    tooltip="An image, or 5, 22, 39, .. frames, to pass through at 'guide_frame'. For more guides, chain "
                    "Add Guide for MiniMax H3 behind this node.",
                ),
                io.Audio.Input("guide_audio", optional=True, tooltip="Sound to have from 'guide_frame' on."),
                io.Int.Input(
                    "guide_frame",
                    default=0,
                    min=-9999,
                    max=9999,
                    optional=True,
                    tooltip="Frame at which the guide begins; negative counts from the end.",
                ),
                several(
                    "ref_images",
                    io.Image.Input("ref_image", tooltip="An image to take a person, a thing or a style from."),
                    "Reference images, <Picture 1> and so on in the prompt.",
                    REFERENCE_IMAGES,
                ),
                several(
                    "ref_videos",
                    io.Image.Input("ref_video", tooltip="Frames at 24 a second, 2 to 15 seconds."),
                    "Reference videos, <Video 1> and so on in the prompt.",
                    REFERENCE_CLIPS,
                ),
                several(
                    "ref_video_audios",
                    io.Audio.Input("ref_video_audio", tooltip="The sound of the reference video of the same number."),
                    "Sound of the reference videos.",
                    REFERENCE_CLIPS,
                ),
                several(
                    "ref_audios",
                    io.Audio.Input("ref_audio", tooltip="A voice or a sound on its own."),
                    "Reference sounds, <Audio 1> and so on in the prompt.",
                    REFERENCE_CLIPS,
                ),
                io.Combo.Input(
                    "ref_image_size",
                    options=["match", "max"],
                    default="match",
                    optional=True,
                    advanced=True,
                    tooltip="'match' scales reference images down to the clip's area; 'max' keeps up to 2048 pixels on the "
                    "short edge: closer likeness, more rows in every step.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="For H3 Packed Denoiser or a guider."),
                io.Latent.Output(display_name="latent", tooltip="The empty latent, video and sound."),
                io.String.Output(display_name="info", tooltip="Task, size, length, and packed rows of every kind."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        width=None,
        height=None,
        frames=None,
        seconds=None,
        # core passes every group of growing inputs to a validator
        ref_images=None,
        ref_videos=None,
        ref_video_audios=None,
        ref_audios=None,
    ):
        try:
            _check_numbers(width, height, frames, seconds)
        except grid.GridError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        clip,
        prompt,
        width,
        height,
        frames,
        seconds,
        vae=None,
        audio_vae=None,
        first_frame=None,
        last_frame=None,
        guide_image=None,
        guide_audio=None,
        guide_frame=0,
        ref_images=None,
        ref_videos=None,
        ref_video_audios=None,
        ref_audios=None,
        ref_image_size="match",
    ):
        _check_numbers(width, height, frames, seconds)
        checks.text_encoder(NODE, "clip", clip)
        references = {
            "ref_images": _given(ref_images),
            "ref_videos": _given(ref_videos),
            "ref_video_audios": _given(ref_video_audios),
            "ref_audios": _given(ref_audios),
        }
        has_references = any(references.values())
        has_frames = first_frame is not None or last_frame is not None
        has_guide = guide_image is not None or guide_audio is not None
        if has_frames and has_references:
            raise ValueError(
                f"{NODE}: first_frame and last_frame do not go with references: H3 has a model for each (fl2va, ref2va). "
                "Keep one of the two, or anchor the image with guide_image"
            )
        unpaired = set(references["ref_video_audios"]) - {
            name.replace("ref_video_", "ref_video_audio_") for name in references["ref_videos"]
        }
        if unpaired:
            raise ValueError(f"{NODE}: {min(unpaired)} has no reference video of the same number: connect it to ref_audios")
        pictures = has_frames or guide_image is not None or references["ref_images"] or references["ref_videos"]
        sounds = guide_audio is not None or references["ref_video_audios"] or references["ref_audios"]
        if pictures:
            checks.video_vae(NODE, "vae", vae)
        if sounds:
            checks.audio_vae(NODE, "audio_vae", audio_vae)

        length = grid.frames_for_seconds(seconds) if seconds else frames
        # by name: newer cores reorder these parameters
        size = {"prompt": prompt, "width": width, "height": height, "length": length}
        if has_references:
            positive, latent = MiniMaxH3ReferenceToVideo.execute(
                clip=clip, vae=vae, audio_vae=audio_vae, ref_image_size=ref_image_size, **size, **references
            ).result
        else:
            positive, latent = MiniMaxH3ImageToVideo.execute(
                clip=clip, vae=vae, first_frame=first_frame, last_frame=last_frame, **size
            ).result
        if has_guide:
            (positive,) = MiniMaxH3AddGuide.execute(
                positive=positive,
                latent=latent,
                frame_idx=guide_frame,
                vae=vae,
                audio_vae=audio_vae,
                image=guide_image,
                audio=guide_audio,
            ).result
        task = "ref2va" if has_references else "fl2va" if has_frames or has_guide else "t2va"
        info = _describe(task, width, height, length, positive, latent)
        log.info("H3 Conditioning: %s", info)
        return io.NodeOutput(positive, latent, info, ui=host.shown(cls, info))


def _check_numbers(width, height, frames, seconds):
    """A number that comes through a link is None before the run, and is checked in the run."""
    if width is not None:
        grid.check_size("width", width)
    if height is not None:
        grid.check_size("height", height)
    if seconds:
        grid.frames_for_seconds(seconds)
    elif frames is not None:
        grid.check_frames(frames)


def _given(several):
    return {name: value for name, value in (several or {}).items() if value is not None}


def _describe(task, width, height, frames, positive, latent):
    video, audio = checks.h3_latent(NODE, "latent", latent)
    text, extra = positive[0][0], positive[0][1]
    rows = grid.segment_rows(
        text.shape[1],
        video.shape,
        audio.shape,
        keyframes=extra.get("minimax_keyframes", ()),
        references=extra.get("minimax_refs", ()),
    )
    kinds = ", ".join(f"{kind} {count}" for kind, count in rows.items())
    return (
        f"{task}, {width} x {height}, {frames} frames = {grid.seconds_for_frames(frames):.3f} s; "
        f"packed rows: {sum(rows.values())} ({kinds})"
    )

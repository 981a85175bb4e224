"""The sizes, frame counts and row counts MiniMax H3 works with.

Rules, from ``comfy_extras/nodes_minimax_h3.py`` and ``comfy/ldm/minimax/model.py`` of ComfyUI 0.33:

* width and height are multiples of 32: the VAE divides by 16 and the DiT packs 2 x 2 latent pixels into one row;
* a clip has 17 k + 5 frames at 24 a second: the VAE works on clips of 17 frames, 5 latent frames each, and 5 frames make 2;
* sound has 40 latent frames a second in two channels, each channel one row per latent frame;
* the DiT sees one packed sequence: text, conditions (keyframes, then references), sound, video.
"""

from __future__ import annotations

SIZE_STEP, MAX_SIZE = 32, 16384
FRAME_RATE = 24
FRAME_STEP, FRAME_OFFSET = 17, 5
MAX_FRAMES = 3592  # the largest 17 k + 5 below the 3600 that core's nodes accept
VIDEO_CHANNELS, AUDIO_CHANNELS, AUDIO_TRACKS = 24, 32, 2
AUDIO_LATENT_RATE = 40
VAE_RATIO, PATCH = 16, 2
LATENT_STEP, LATENT_OFFSET = 5, 2


class GridError(ValueError):
    """A size or a frame count that H3 cannot make. The message names the nearest legal values."""


def check_size(name, value):
    """Raise :class:`GridError` unless ``value`` (pixels) is a multiple of 32, 32 to 16384. ``name``: width or height."""
    if not SIZE_STEP <= value <= MAX_SIZE:
        raise GridError(f"{name} {value} is out of range: use {SIZE_STEP} to {MAX_SIZE}, in steps of {SIZE_STEP}")
    if value % SIZE_STEP:
        below = value // SIZE_STEP * SIZE_STEP
        raise GridError(f"{name} {value} is not a multiple of {SIZE_STEP}: use {below} or {below + SIZE_STEP}")


def check_frames(frames):
    """Raise :class:`GridError` unless ``frames`` is 17 k + 5, from 5 to 3592."""
    if not FRAME_OFFSET <= frames <= MAX_FRAMES:
        raise GridError(f"{frames} frames is out of range: use {FRAME_OFFSET} to {MAX_FRAMES}, in steps of {FRAME_STEP}")
    past = (frames - FRAME_OFFSET) % FRAME_STEP
    if past:
        below = frames - past
        raise GridError(f"{frames} frames is not on the 17k+5 grid: use {below} or {below + FRAME_STEP}")


def frames_for_seconds(seconds):
    """The legal frame count nearest to ``seconds`` at 24 frames a second (the longer one when two are as near).

    Raises :class:`GridError` when ``seconds`` is not above 0 or is longer than the longest clip.
    """
    longest = MAX_FRAMES / FRAME_RATE
    if not 0 < seconds <= longest:
        raise GridError(f"{seconds:g} seconds is out of range: use more than 0, up to {longest:.2f}")
    steps = (seconds * FRAME_RATE - FRAME_OFFSET) / FRAME_STEP
    return max(int(steps + 0.5), 0) * FRAME_STEP + FRAME_OFFSET


def seconds_for_frames(frames):
    return frames / FRAME_RATE


def latent_frames(frames):
    """Latent frames of a clip of ``frames`` = 17 k + 5 frames: 5 k + 2."""
    check_frames(frames)
    return (frames - FRAME_OFFSET) // FRAME_STEP * LATENT_STEP + LATENT_OFFSET


def frames_for_latent(latent_t):
    """Frames that ``latent_t`` = 5 k + 2 latent frames decode to. Raises :class:`GridError` off that grid."""
    if latent_t < LATENT_OFFSET or (latent_t - LATENT_OFFSET) % LATENT_STEP:
        below = max(0, latent_t - LATENT_OFFSET) // LATENT_STEP * LATENT_STEP + LATENT_OFFSET
        raise GridError(f"{latent_t} latent frames is not on the 5k+2 grid: use {below} or {below + LATENT_STEP}")
    return (latent_t - LATENT_OFFSET) // LATENT_STEP * FRAME_STEP + FRAME_OFFSET


def audio_latent_frames(frames):
    """Latent frames of sound, per channel, that go with ``frames`` of video."""
    return round(frames / FRAME_RATE * AUDIO_LATENT_RATE)


def video_latent_shape(width, height, frames):
    """Shape [1, 24, T, height / 16, width / 16] of the video latent. Raises :class:`GridError`."""
    check_size("width", width)
    check_size("height", height)
    return (1, VIDEO_CHANNELS, latent_frames(frames), height // VAE_RATIO, width // VAE_RATIO)


def audio_latent_shape(frames):
    """Shape [1, 32, 2, t] of the sound latent, t at 40 a second. Raises :class:`GridError`."""
    check_frames(frames)
    return (1, AUDIO_CHANNELS, AUDIO_TRACKS, audio_latent_frames(frames))


def latent_fault(shapes):
    """Why tensors of these shapes are not an H3 latent, or None when they are.

    Args:
        shapes: the shapes of the latent's streams; H3 has two, video [B, 24, T, h, w] and sound [B, 32, 2, t].
    """
    if len(shapes) != 2:
        return f"it has {len(shapes)} stream(s) where H3 has two, video and sound"
    video, audio = shapes
    if not is_video(video):
        return f"its video stream is {list(video)}, H3's is [1, {VIDEO_CHANNELS}, T, height/16, width/16]"
    if not is_audio(audio):
        return f"its sound stream is {list(audio)}, H3's is [1, {AUDIO_CHANNELS}, {AUDIO_TRACKS}, t]"
    return None


def is_video(shape):
    """Is this the shape of a video stream, [B, 24, T, h, w]?"""
    return len(shape) == 5 and shape[1] == VIDEO_CHANNELS


def is_audio(shape):
    """Is this the shape of a sound stream, [B, 32, 2, t]?"""
    return len(shape) == 4 and tuple(shape[1:3]) == (AUDIO_CHANNELS, AUDIO_TRACKS)


def segment_rows(text_tokens, video_shape, audio_shape, keyframes=(), references=()):
    """Rows of each kind in the packed sequence, in the order of the sequence.

    Args:
        text_tokens: length of the conditioning, [1, text_tokens, width].
        video_shape: [1, 24, T, h, w]; odd h and w count as padded to even, as the DiT pads them.
        audio_shape: [1, 32, 2, t].
        keyframes: what the conditioning carries as ``minimax_keyframes``.
        references: what it carries as ``minimax_refs``.

    Returns:
        ``{"text", "cond", "cond_audio", "ref_img", "ref_audio", "audio", "video": rows}``, the names that core's packed
        layout uses, without those that have no rows.
    """
    frame_rows = _frame_rows(video_shape[3], video_shape[4])
    rows = dict.fromkeys(("text", "cond", "cond_audio", "ref_img", "ref_audio", "audio", "video"), 0)
    rows["text"] = text_tokens
    for keyframe in keyframes:
        if keyframe.get("latent") is not None:
            rows["cond"] += keyframe["latent"].shape[2] * frame_rows
        if keyframe.get("audio_latent") is not None:
            rows["cond_audio"] += keyframe["audio_latent"].shape[-1] * AUDIO_TRACKS
    for reference in references:
        if reference["kind"] != "audio":
            latent_t = reference.get("latent_t", 1)  # an image has none
            rows["ref_img"] += latent_t * _frame_rows(reference["latent_h"], reference["latent_w"])
        rows["ref_audio"] += reference.get("ref_audio_t", 0) * AUDIO_TRACKS
    rows["audio"] = audio_shape[3] * AUDIO_TRACKS
    rows["video"] = video_shape[2] * frame_rows
    return {kind: count for kind, count in rows.items() if count}


def _frame_rows(latent_h, latent_w):
    return -(-latent_h // PATCH) * -(-latent_w // PATCH)

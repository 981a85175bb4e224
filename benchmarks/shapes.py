"""The sizes every benchmark uses: models, jobs and the matrices of one block."""

import re
from dataclasses import dataclass, replace

from ..h3 import grid

LATENT_CHANNELS, AUDIO_CHANNELS = grid.VIDEO_CHANNELS, grid.AUDIO_CHANNELS


@dataclass(frozen=True)
class Model:
    """Widths of a MiniMax H3 DiT in its curve ("pruned") form.

    ``curve``: points and coordinates of the adaLN curve table. ``inv_freq``: rotary frequencies per axis.
    """

    name: str
    hidden: int
    blocks: int
    heads: int
    head_dim: int
    ffn: int
    text_dim: int
    refiner_blocks: int
    curve: tuple[int, int] = (1025, 8)
    inv_freq: int = 16

    @property
    def inner(self):
        return self.heads * self.head_dim

    def gemms(self):
        """``{name: (out features, in features)}`` of one block's four Linears."""
        return {
            "qkv": (3 * self.inner, self.hidden),
            "out_proj": (self.hidden, self.inner),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }

    def with_blocks(self, blocks):
        return self if blocks is None else replace(self, blocks=blocks)


@dataclass(frozen=True)
class Job:
    """One text-to-video job. ``width``/``height`` in pixels, ``frames`` at 24 fps, ``text`` in tokens."""

    name: str
    width: int
    height: int
    frames: int
    text: int = 100

    def __post_init__(self):
        try:
            grid.check_size("width", self.width)
            grid.check_size("height", self.height)
            grid.check_frames(self.frames)
        except grid.GridError as error:
            raise ValueError(f"job {self.name}: {error}") from None

    @property
    def latent(self):
        """Video latent (t, h, w)."""
        return grid.video_latent_shape(self.width, self.height, self.frames)[2:]

    @property
    def audio(self):
        """Audio latent frames per channel."""
        return grid.audio_latent_frames(self.frames)

    @property
    def rows(self):
        """Tokens of the packed sequence: text, two audio channels, video in 2 x 2 patches."""
        t, h, w = self.latent
        return self.text + 2 * self.audio + t * (h // 2) * (w // 2)


MODELS = {
    "h3": Model("h3", hidden=5376, blocks=50, heads=56, head_dim=128, ffn=14336, text_dim=5120, refiner_blocks=2),
    # Kernel-realistic proportions (head width 128, everything a multiple of 256) at a size a CPU runs in milliseconds.
    "tiny": Model("tiny", hidden=256, blocks=3, heads=2, head_dim=128, ffn=512, text_dim=512, refiner_blocks=1),
}
JOBS = {
    "canonical": Job("canonical", 1344, 768, 124),
    "864x480x124": Job("864x480x124", 864, 480, 124),
    "1344x768x362": Job("1344x768x362", 1344, 768, 362),
    "small": Job("small", 416, 256, 39),
    "tiny": Job("tiny", 64, 64, 5, text=7),
}


def job(name):
    """The job called ``name``: one of :data:`JOBS`, or ``WIDTHxHEIGHTxFRAMES``. Raises ValueError."""
    if name in JOBS:
        return JOBS[name]
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", name)
    if match is None:
        raise ValueError(f"unknown job {name!r}: use {', '.join(JOBS)} or WIDTHxHEIGHTxFRAMES, such as 1344x768x124")
    return Job(name, *map(int, match.groups()))


def model(name):
    """The model called ``name``. Raises ValueError."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: use {', '.join(MODELS)}")
    return MODELS[name]


def step_flops(model, job):
    """(matrix, attention) floating-point operations of one denoiser forward's blocks; a multiply-add counts two."""
    rows = job.rows
    matrix = sum(2 * rows * out * into for out, into in model.gemms().values())
    attention = 4 * rows * rows * model.inner
    return matrix * model.blocks, attention * model.blocks


def elementwise_bytes(model, job):
    """Bytes that stock's norms, modulation, gates, rope and activation move in one forward in BF16.

    Counted per block: two norms (2 U each), modulation 2 x two passes (4 U each), two gates (3 U each), rope (4 I),
    the copy of V (2 I) and the activation as two kernels (2 F + 3 F), for U, I, F = one BF16 tensor of the
    hidden, attention and feed-forward width.
    """
    u, i, f = (job.rows * width * 2 for width in (model.hidden, model.inner, model.ffn))
    return (18 * u + 6 * i + 5 * f) * model.blocks

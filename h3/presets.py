"""Which steps, flow shifts and sampler a Turbo file wants, by its name or by its SHA-256.

The shifts and step counts are those of the files' model cards and discussions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from . import sigmas


@dataclass(frozen=True)
class Preset:
    """``steps`` model calls at flow shifts ``shift_video`` / ``shift_audio``. ``alpha``: of one LoRA of a file that states none.

    ``grid``: the video sigmas (without the last 0) of a file that was trained on a grid of its own.
    """

    name: str
    steps: int
    shift_video: float = 12.0
    shift_audio: float = 3.0
    sampler: str = "turbo_euler"
    alpha: float | None = None
    note: str = ""
    grid: tuple[float, ...] = ()

    def sigmas(self, steps=None, shift_video=None):
        """fp32 ``[steps + 1]``: the file's own grid, or the turbo grid of other steps or another shift."""
        steps, shift = steps or self.steps, shift_video or self.shift_video
        if self.grid and steps == self.steps and shift == self.shift_video:
            return torch.tensor((*self.grid, 0.0), dtype=torch.float32)
        return sigmas.turbo(steps, shift)

    def describe(self):
        return f"{self.steps} steps, shifts {self.shift_video:g}/{self.shift_audio:g}, {self.sampler}"


ROUGH_SOUND = "4 steps can leave the sound rough; 6 to 8 steps clear it"
HYPERFLOW = (1.0, 0.99391, 0.98429, 0.96606, 0.92308, 0.83494, 0.69685, 0.46875)

# Chosen on the node; the names say what they set.
CHOICES = {
    "4 steps, 12/3": Preset("4 steps, 12/3", 4, note=ROUGH_SOUND),
    "4 steps 768p, 6/3": Preset("4 steps 768p, 6/3", 4, 6.0),
    "6 steps, 12/3": Preset("6 steps, 12/3", 6),
    "8 steps, 12/3": Preset("8 steps, 12/3", 8),
    "8 steps 768p, 6/3": Preset("8 steps 768p, 6/3", 8, 6.0),
}
# Patterns of file names (lower case, "-" and spaces as "_"), the more specific ones first.
KNOWN = tuple(
    (re.compile(pattern), preset)
    for pattern, preset in (
        (r"ref2v.*turbo.*4_?step.*768p|ref2va?_4_?step.*768p", Preset("lightx2v ref2v 4-step 768p", 4, 6.0)),
        (r"ref2v.*turbo.*8_?step.*768p|ref2va?_8_?step.*768p", Preset("lightx2v ref2v 8-step 768p", 8, 6.0)),
        (r"ref2v.*turbo.*4_?step|ref2va?_4_?step", Preset("lightx2v ref2v 4-step", 4, note=ROUGH_SOUND)),
        (r"ref2v.*turbo.*8_?step|ref2va?_8_?step", Preset("lightx2v ref2v 8-step", 8)),
        (r"fl2v.*turbo.*4_?step.*768p", Preset("lightx2v fl2v 4-step 768p", 4, 6.0, alpha=128.0)),
        (r"fl2v.*turbo.*8_?step.*768p", Preset("lightx2v fl2v 8-step 768p", 8, 6.0)),
        (r"fl2v.*turbo.*4_?step.*v0[._]1", Preset("lightx2v fl2v 4-step v0.1", 4, alpha=8.0, note=ROUGH_SOUND)),
        (r"fl2v.*turbo.*8_?step.*v1[._]0", Preset("lightx2v fl2v 8-step v1.0", 8, alpha=8.0)),
        (r"turbo_v4_step600", Preset("larryvrh Turbo v4", 4, note=ROUGH_SOUND)),
        (r"h3_turbo_4step(_ema)?(_ckpt\d+)?\b", Preset("larryvrh Turbo 4-step", 4, note=ROUGH_SOUND)),
        (r"hyperflow", Preset("HyperFlow 8-step", 8, grid=HYPERFLOW)),
    )
)
HASHES = {
    "5f3a626cd72c93a8b9318d6760c510bc5092d2ab13aaba1f932c5bab07a416d3": Preset("larryvrh Turbo v4", 4, note=ROUGH_SOUND),
}


def choose(filename, sha256=None):
    """(preset, how it was found, in words) of a file.

    Args:
        filename: name of the file, folders allowed.
        sha256: returns the file's hash; called only when the name is unknown. None: the name must do.
    """
    name = re.sub(r"[- ]", "_", re.split(r"[\\/]", filename)[-1].lower())
    for pattern, preset in KNOWN:
        if pattern.search(name):
            return preset, f"known file name ({preset.name})"
    if sha256 is not None:
        preset = HASHES.get(sha256())
        if preset is not None:
            return preset, f"known content ({preset.name})"
    stated = re.search(r"(?<!\d)(\d{1,2})_?steps?", name)
    steps = int(stated[1]) if stated and 1 <= int(stated[1]) <= 16 else 8
    shift = 6.0 if "768p" in name else 12.0
    what = f"{steps} steps from its name" if stated and steps == int(stated[1]) else f"{steps} steps because its name states none"
    return Preset("unknown file", steps, shift), f"unknown file: {what}; check them against its model card"


def schedule_warning(preset, steps):
    """A sentence when ``steps`` is a base model's schedule rather than a Turbo file's, or None."""
    if steps <= 2 * preset.steps:
        return None
    return (
        f"{steps} steps with a Turbo LoRA made for {preset.steps}: that is a schedule of the base model; take the sigmas of H3 Turbo LoRA, "
        "or set its strength to 0"
    )

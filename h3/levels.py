"""Loudness of decoded sound: a broken sound track is seen here before it is heard."""

from __future__ import annotations

import math
from dataclasses import dataclass

CLIP = 1.0
SILENT_DBFS = -60.0
MAX_OFFSET = 0.05


@dataclass
class Levels:
    """``peak`` and ``rms`` in dB of full scale (-inf when silent), ``offset`` the mean, ``clipped`` the share at or above 1."""

    peak: float
    rms: float
    offset: float
    clipped: float

    def faults(self):
        """What is wrong with the sound, in words; an empty list when nothing is."""
        found = []
        if self.peak < SILENT_DBFS:
            found.append("the sound is silent")
        if self.clipped > 0.001:
            found.append(f"{self.clipped:.1%} of the samples clip")
        if abs(self.offset) > MAX_OFFSET:
            found.append(f"the sound has a constant offset of {self.offset:+.3f}")
        return found

    def __str__(self):
        return f"peak {self.peak:.1f} dBFS, RMS {self.rms:.1f} dBFS, offset {self.offset:+.4f}"


def measure(waveform):
    """:class:`Levels` of a waveform [B, channels, samples] in [-1, 1]."""
    wave = waveform.float()
    return Levels(
        peak=_dbfs(float(wave.abs().amax())),
        rms=_dbfs(float(wave.square().mean().sqrt())),
        offset=float(wave.mean()),
        clipped=float((wave.abs() >= CLIP).float().mean()),
    )


def _dbfs(amplitude):
    return 20 * math.log10(amplitude) if amplitude > 0 else -math.inf

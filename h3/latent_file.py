"""An H3 latent, both streams or the one that there is, in one safetensors file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_FORMAT = "h3_vortex_latent_1"


def save(path, video, audio):
    """Write ``video`` [B, 24, T, h, w] and ``audio`` [B, 32, 2, t] to ``path``, whole or not at all; raises OSError as any write does.

    Either may be None: it is then not in the file.
    """
    from safetensors.torch import save

    data = save(
        {name: stream.detach().cpu().contiguous() for name, stream in (("video", video), ("audio", audio)) if stream is not None},
        metadata={"format": _FORMAT},
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path):
    """The two tensors ``(video, audio)`` that :func:`save` wrote, None for one that it left out. Raises ValueError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("format") != _FORMAT:
                raise ValueError(f"{Path(path).name} is not a latent that H3 Decode saved")
            names = set(file.keys())
            if not names or names - {"video", "audio"}:
                raise ValueError(f"{Path(path).name} holds {sorted(names)}, a saved latent holds video, audio or both")
            return tuple(file.get_tensor(name) if name in names else None for name in ("video", "audio"))
    except SafetensorError as error:
        raise ValueError(f"{Path(path).name} cannot be read as a saved latent: {error}") from error

"""AdaLN LoRA pairs on pruned checkpoints, expressed in the checkpoint's own basis of the time curve.

A full H3 modulates with ``W g(t) + b``, ``g(t) = silu(time_embedder(t))`` of 2,688 values. A pruned one stores ``W' c(t) + b'`` with a
curve table ``c`` of ``[1025, 8]`` on a uniform grid of ``t`` in [0, 1]. A pair trained on the full form adds ``B A g(t)``. There is no
``g`` in a pruned file, but with the time embedder of the full model at hand, ``A g(t)`` is a known curve, and ``A' c(t) + a'`` is fitted
to it over the table's grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_TABLE_RESIDUAL = 1e-3  # above it the table is not of this time embedder: pruned files keep it to about 1e-5
NAMES = {
    "proj_in": ("time_embedder.proj_in", "time_embedder.linear_1"),
    "proj_out": ("time_embedder.proj_out", "time_embedder.linear_2"),
}


@dataclass(frozen=True)
class Fit:
    """``down`` ``[r, k]`` and ``bias`` ``[r]``, fp32; ``residual``: what ``B (A' c + a')`` misses of ``B A g`` over the grid, relative."""

    down: torch.Tensor
    bias: torch.Tensor
    residual: float


def time_curve(get, keys, points):
    """``g(t)`` on ``points`` uniform values of t in [0, 1], float64 ``[points, t_dim]``.

    Args:
        get: ``get(key) -> tensor`` of a full checkpoint; only the four time embedder tensors are asked for.
        keys: the checkpoint's keys, with or without a prefix, in ComfyUI's or diffusers' names.

    Raises:
        ValueError: the checkpoint has no time embedder.
    """
    def tensor(name, kind):
        for alias in NAMES[name]:
            for key in keys:
                if key == f"{alias}.{kind}" or key.endswith(f".{alias}.{kind}"):
                    return get(key).double()
        raise ValueError(f"this checkpoint has no {NAMES[name][0]}.{kind}: choose a full one (not pruned), whose AdaLN has a time embedder")

    width = tensor("proj_in", "weight").shape[1]
    # comfy.ldm.minimax.model.TimeEmbedder: cosines before sines
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.linspace(0, 1, points, dtype=torch.float64)[:, None] * frequencies
    hidden = torch.cat([angles.cos(), angles.sin()], dim=-1) @ tensor("proj_in", "weight").T + tensor("proj_in", "bias")
    embedded = torch.nn.functional.silu(hidden) @ tensor("proj_out", "weight").T + tensor("proj_out", "bias")
    return torch.nn.functional.silu(embedded)


def _basis(table):
    return torch.cat([table.double(), torch.ones(table.shape[0], 1, dtype=torch.float64)], dim=1)


def check_table(curve, table):
    """Relative distance of the full curve from the span of the table (and a constant).

    Raises:
        ValueError: it is too large for the table to have been made from this curve.
    """
    basis = _basis(table)
    rest = curve - basis @ torch.linalg.lstsq(basis, curve).solution
    residual = float(rest.norm() / curve.norm())
    if residual > MAX_TABLE_RESIDUAL:
        raise ValueError(
            f"the time curve of this full checkpoint is {residual:.2%} away from the pruned model's table, at most "
            f"{MAX_TABLE_RESIDUAL:.1%} is allowed: the pruned model was made from another checkpoint; choose that one"
        )
    return residual


def fit(adapter, curve, table):
    """:class:`Fit` of an AdaLN adapter (one group, ``down`` of the full width) to the curve table ``[grid, k]``."""
    target = curve @ adapter.down.double().T
    basis = _basis(table)
    solution = torch.linalg.lstsq(basis, target).solution.float()  # as it is stored
    weight = adapter.up.double().T @ adapter.up.double()

    def size(hidden):
        return float(((hidden @ weight) * hidden).sum().clamp(min=0)) ** 0.5

    full = size(target)
    residual = size(target - basis @ solution.double()) / full if full else 0.0
    return Fit(solution[:-1].T.contiguous(), solution[-1].contiguous(), residual)

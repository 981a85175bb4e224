"""The packed sequence's modulation segments as one row index per token.

ComfyUI describes which modulation row each token uses as a list ``(start, stop, row)``; ``row`` is an int, or (cores that honour
denoise masks) a LongTensor with one row per token of the segment. Kernels read one int32 per token instead, which serves any
number of segments, any alignment and both forms. Built once per model call and dropped with it.
"""

import torch


def row_map(segments, n_rows: int, device) -> torch.Tensor:
    """One modulation row per token.

    Args:
        segments: ``[(start, stop, row), ...]`` covering ``0..n_rows`` contiguously and in order; empty segments are allowed.
        n_rows: rows of the packed sequence.
        device: where the map is needed.

    Returns:
        int32 tensor ``[n_rows]`` on ``device``.

    Raises:
        ValueError: the segments leave a gap, overlap, or do not end at ``n_rows``; a per-token row tensor has another length.
    """
    position = 0
    rows, lengths, per_token = [], [], False
    for start, stop, row in segments:
        if start != position or stop < start:
            raise ValueError(f"segments must follow each other: expected one starting at row {position}, got ({start}, {stop})")
        if isinstance(row, torch.Tensor) and row.numel() != stop - start:
            raise ValueError(f"segment ({start}, {stop}) has {stop - start} tokens but {row.numel()} modulation rows")
        per_token |= isinstance(row, torch.Tensor)
        rows.append(row)
        lengths.append(stop - start)
        position = stop
    if position != n_rows:
        raise ValueError(f"segments end at row {position}, the sequence has {n_rows} rows")
    if not per_token:  # the usual case: one small host tensor, one copy
        return torch.repeat_interleave(torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths)).to(device)
    return torch.cat([
        row.reshape(-1).to(device=device, dtype=torch.int32) if isinstance(row, torch.Tensor)
        else torch.full((length,), row, dtype=torch.int32, device=device)
        for row, length in zip(rows, lengths, strict=True)
    ])

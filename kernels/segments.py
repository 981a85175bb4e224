"""The packed sequence's modulation segments as one row index per token.

ComfyUI describes which modulation row each token uses as a list ``(start, stop, row)``; ``row`` is an int, or (cores that honour
denoise masks) a LongTensor with one row per token of the segment. Kernels read one int32 per token instead, which serves any
number of segments, any alignment and both forms. Built once per model call and dropped with it.
"""

import torch

_GATHER_ROWS = 4096


def row_map(segments, n_rows: int, device) -> torch.Tensor:
    """One modulation row per token.

    Args:
        segments: ``[(start, stop, row), ...]`` covering ``0..n_rows`` contiguously and in order; empty segments are allowed.
        n_rows: rows of the packed sequence.
        device: where the map is needed.

    Returns:
        int32 tensor ``[n_rows]`` on ``device``.

    Raises:
        ValueError: the segments leave a gap, overlap, or do not end at ``n_rows``; a row is negative; a per-token row tensor has another
            length.
    """
    position = 0
    rows, lengths, per_token = [], [], False
    for start, stop, row in segments:
        if start != position or stop < start:
            raise ValueError(f"segments must follow each other: expected one starting at row {position}, got ({start}, {stop})")
        if isinstance(row, torch.Tensor) and row.numel() != stop - start:
            raise ValueError(f"segment ({start}, {stop}) has {stop - start} tokens but {row.numel()} modulation rows")
        if not isinstance(row, torch.Tensor) and row < 0:
            raise ValueError(f"segment ({start}, {stop}) has modulation row {row}; rows count from 0")
        per_token |= isinstance(row, torch.Tensor)
        rows.append(row)
        lengths.append(stop - start)
        position = stop
    if position != n_rows:
        raise ValueError(f"segments end at row {position}, the sequence has {n_rows} rows")
    if not per_token:  # the usual case: one small host tensor, one copy
        return torch.repeat_interleave(torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64)).to(device)
    return torch.cat([
        row.reshape(-1).to(device=device, dtype=torch.int32) if isinstance(row, torch.Tensor)
        else torch.full((length,), row, dtype=torch.int32, device=device)
        for row, length in zip(rows, lengths, strict=True)
    ])


def rounded(table: torch.Tensor) -> torch.Tensor:
    """An AdaLN table in bf16, as stock rounds it at each use.

    For the kernels that hold a row of the stream in registers: a copy of a few rows costs less there than fp32 loads for every token.
    """
    return table if table.dtype == torch.bfloat16 else table.to(torch.bfloat16)


def runs(rows: torch.Tensor):
    """``(start, stop, row)`` covering a row map in order, for the eager references: ``table[row]`` is what stock indexes with.

    On the CPU the runs are the maximal stretches of one row, so a reference issues the very calls that stock issues for a
    segment list. (There the bytes of ``addcmul_`` depend on the call's shape: torch's vectorised loop and its scalar tail
    round differently, which shows when the width is not a multiple of 32.) Elsewhere reading the map would stall the stream,
    so ``row`` is the map itself, in stretches short enough that the gathered table rows stay small.
    """
    if rows.device.type != "cpu":
        for start in range(0, rows.numel(), _GATHER_ROWS):
            stop = min(start + _GATHER_ROWS, rows.numel())
            yield start, stop, rows[start:stop]
        return
    values, counts = torch.unique_consecutive(rows, return_counts=True)
    start = 0
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        yield start, start + count, value
        start += count


def check_modulation(op: str, name: str, h: torch.Tensor, rows: torch.Tensor, **tables: torch.Tensor) -> None:
    """Raises ValueError unless ``h`` is ``[S, H]``, every table ``[R, H]`` with one R, ``rows`` dense int32 ``[S]``, all on one device."""
    if h.dim() != 2:
        raise ValueError(f"{op}: {name} must be [S, H], got shape {list(h.shape)}")
    first = next(iter(tables.values()))
    for key, table in tables.items():
        if table.dim() != 2 or table.shape[1] != h.shape[1] or table.shape[0] != first.shape[0]:
            raise ValueError(f"{op}: {key} must be [R, {h.shape[1]}] with the R of the other tables, got shape {list(table.shape)}")
        if table.device != h.device:
            raise ValueError(f"{op}: {key} is on {table.device}, {name} on {h.device}")
    if rows.dtype != torch.int32 or rows.shape != h.shape[:1] or rows.device != h.device or not rows.is_contiguous():
        raise ValueError(
            f"{op}: rows must be int32 [{h.shape[0]}] on {h.device}, without gaps (make it with segments.row_map), "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}, strides {list(rows.stride())}"
        )


def check_like(op: str, name: str, x: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError unless the other tensors have the shape, dtype and device of ``x``."""
    for key, other in others.items():
        if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
            raise ValueError(
                f"{op}: {key} must be {x.dtype} {list(x.shape)} on {x.device} like {name}, "
                f"got {other.dtype} {list(other.shape)} on {other.device}"
            )


def check_weight(op: str, name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError unless ``weight`` is ``[H]`` on the device of ``x``."""
    if weight.shape != x.shape[1:] or weight.device != x.device:
        raise ValueError(f"{op}: weight must be [{x.shape[1]}] on {x.device}, got {list(weight.shape)} on {weight.device}")

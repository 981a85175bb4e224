"""Segment lists of any shape through the row map, its runs, and the ops' references against stock's loop over segments."""

import pytest
import torch
from h3_vortex.kernels import gate, modulate, segments
from h3_vortex.tests.fuzz import budget
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def jobs(draw, most=24):
    """(segments, rows): consecutive segments, some empty, rows as ints or one per token."""
    found, position = [], 0
    for length in draw(st.lists(st.integers(0, 40), max_size=most)):
        row = draw(st.integers(0, 11))
        if draw(st.integers(0, 4)) == 0:
            row = torch.tensor(draw(st.lists(st.integers(0, 11), min_size=length, max_size=length)), dtype=torch.int64)
        found.append((position, position + length, row))
        position += length
    return found, position


def naive(runs, count):
    rows = torch.full((count,), -1, dtype=torch.int32)
    for start, stop, row in runs:
        rows[start:stop] = row.to(torch.int32) if isinstance(row, torch.Tensor) else row
    return rows


@budget(150)
@given(jobs())
def test_row_map_is_what_the_segments_say(job):
    runs, count = job
    rows = segments.row_map(runs, count, "cpu")
    assert rows.dtype == torch.int32 and torch.equal(rows, naive(runs, count)) and not bool((rows < 0).any())
    position = 0
    for start, stop, row in segments.runs(rows):
        assert start == position and stop > start and bool((rows[start:stop] == row).all())
        assert start == 0 or int(rows[start - 1]) != row
        position = stop
    assert position == count


@budget(100)
@given(jobs(), st.data())
def test_a_broken_list_is_refused(job, data):
    runs, count = job
    how = data.draw(st.sampled_from(["shift", "drop", "negative", "short", "long", "swap"]))
    index = data.draw(st.integers(0, max(0, len(runs) - 1)))
    if how in ("short", "long") or not runs:
        count += 1 if how == "long" or not count else -1
    else:
        start, stop, row = runs[index]
        if how == "shift":
            runs[index] = (start + 1, stop + 1, row)
        elif how == "negative":
            runs[index] = (start, stop, -1)
        elif stop == start:
            return  # dropping or moving an empty segment changes nothing
        elif how == "drop":
            del runs[index]
        else:
            runs[index] = (stop, start, row)
    with pytest.raises(ValueError, match="segments|segment|rows"):
        segments.row_map(runs, count, "cpu")


@budget(60)
@given(jobs(most=10), st.sampled_from([torch.bfloat16, torch.float32]), st.sampled_from([8, 32, 40]), st.integers(0, 99))
def test_references_are_the_loop_over_segments(job, dtype, width, seed):
    runs, count = job
    generator = torch.Generator().manual_seed(seed)
    x, other = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(2))
    shift, scale, gates = (torch.randn(12, width, generator=generator) for _ in range(3))
    rows = segments.row_map(runs, count, "cpu")
    ours, stock = modulate.modulate(x.clone(), shift, scale, rows), x.clone()
    gated, stock_gated = gate.gate(x.clone(), other, gates, rows), x.clone()
    # maximal runs of one row: what stock is given (on the CPU the bytes of addcmul_ depend on the call's length)
    for start, stop, row in segments.runs(rows):
        stock[start:stop].mul_(1 + scale[row].to(dtype)).add_(shift[row].to(dtype))
        stock_gated[start:stop].addcmul_(other[start:stop], gates[row].to(dtype))
    kind = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.view(kind), stock.view(kind)) and torch.equal(gated.view(kind), stock_gated.view(kind))

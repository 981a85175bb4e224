"""Row maps: any number of segments, empty ones, one row per token; what does not cover the sequence is refused."""

import pytest
import torch
from h3_vortex.kernels.segments import row_map, runs
from hypothesis import given
from hypothesis import strategies as st


def naive(segments, n):
    rows = torch.full((n,), -1)
    for a, b, row in segments:
        rows[a:b] = row
    return rows


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=30), st.integers(0, 1000))
def test_row_map_is_what_the_segments_say(parts, seed):
    generator = torch.Generator().manual_seed(seed)
    segments, position = [], 0
    for length, row, per_token in parts:
        rows = torch.randint(0, 6, (length,), generator=generator) if per_token else row
        segments.append((position, position + length, rows))
        position += length
    got = row_map(segments, position, "cpu")
    assert got.dtype == torch.int32 and torch.equal(got.long(), naive(segments, position))


def test_101_segments():
    segments = [(7 * i, 7 * i + 7, i % 6) for i in range(101)]
    assert torch.equal(row_map(segments, 707, "cpu").long(), naive(segments, 707))


@pytest.mark.parametrize("segments, words", [
    ([(1, 4, 0)], r"expected one starting at row 0, got \(1, 4\)"),
    ([(0, 2, 0), (3, 4, 0)], r"expected one starting at row 2, got \(3, 4\)"),
    ([(0, 2, 0), (1, 4, 0)], r"expected one starting at row 2, got \(1, 4\)"),
    ([(0, 3, 0)], "segments end at row 3, the sequence has 4 rows"),
    ([(0, 4, -1)], r"segment \(0, 4\) has modulation row -1"),
    ([(0, 4, torch.zeros(3, dtype=torch.long))], r"segment \(0, 4\) has 4 tokens but 3 modulation rows"),
])  # fmt: skip
def test_what_does_not_cover_the_sequence(segments, words):
    with pytest.raises(ValueError, match=words):
        row_map(segments, 4, "cpu")


@given(st.lists(st.integers(0, 3), max_size=60))
def test_runs_are_maximal_and_cover_the_map(values):
    rows = torch.tensor(values, dtype=torch.int32)
    position, previous = 0, None
    for start, stop, row in runs(rows):
        assert start == position < stop and row != previous
        assert (rows[start:stop] == row).all()
        position, previous = stop, row
    assert position == len(values)


def test_runs_elsewhere_do_not_read_the_map():
    """A ``meta`` tensor has no values to read, as a CUDA one must not be asked for them."""
    rows = torch.zeros(10_000, dtype=torch.int32, device="meta")
    parts = list(runs(rows))
    assert [p[:2] for p in parts] == [(0, 4096), (4096, 8192), (8192, 10_000)]
    assert all(len(row) == stop - start for start, stop, row in parts)

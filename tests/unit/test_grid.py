"""Sizes, frame counts and packed rows."""

import re

import pytest
from h3_vortex.h3 import grid
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("width", 1350, "width 1350 is not a multiple of 32: use 1344 or 1376"),
        ("height", 33, "height 33 is not a multiple of 32: use 32 or 64"),
        ("height", 16, "height 16 is out of range: use 32 to 16384, in steps of 32"),
    ],
)
def test_a_wrong_size_names_the_nearest(name, value, message):
    with pytest.raises(grid.GridError) as caught:
        grid.check_size(name, value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "frames, message",
    [
        (100, "100 frames is not on the 17k+5 grid: use 90 or 107"),
        (6, "6 frames is not on the 17k+5 grid: use 5 or 22"),
        (4, "4 frames is out of range: use 5 to 3592, in steps of 17"),
        (3593, "3593 frames is out of range: use 5 to 3592, in steps of 17"),
    ],
)
def test_a_wrong_frame_count_names_the_nearest(frames, message):
    with pytest.raises(grid.GridError) as caught:
        grid.check_frames(frames)
    assert str(caught.value) == message


def test_canonical_clip():
    assert grid.video_latent_shape(1344, 768, 124) == (1, 24, 37, 48, 84)
    assert grid.audio_latent_shape(124) == (1, 32, 2, 207)
    assert grid.seconds_for_frames(124) == pytest.approx(5.1667, abs=1e-4)


@given(st.integers(0, 211))
def test_frames_and_latent_frames_are_inverse(k):
    frames = 17 * k + 5
    grid.check_frames(frames)
    assert grid.frames_for_latent(grid.latent_frames(frames)) == frames
    assert grid.frames_for_seconds(grid.seconds_for_frames(frames)) == frames


@given(st.floats(0, 3592 / 24, exclude_min=True))
def test_seconds_give_the_nearest_legal_count(seconds):
    frames = grid.frames_for_seconds(seconds)
    grid.check_frames(frames)
    legal = [17 * k + 5 for k in range(212)]
    assert abs(frames - seconds * 24) <= min(abs(f - seconds * 24) for f in legal) + 1e-6


@pytest.mark.parametrize("seconds", [0, -1.5, 150, float("nan")])
def test_seconds_out_of_range(seconds):
    with pytest.raises(grid.GridError, match=r"seconds is out of range: use more than 0, up to 149\.67"):
        grid.frames_for_seconds(seconds)


def test_latent_frames_off_the_grid():
    with pytest.raises(grid.GridError, match=r"3 latent frames is not on the 5k\+2 grid: use 2 or 7"):
        grid.frames_for_latent(3)
    with pytest.raises(grid.GridError, match="use 2 or 7"):
        grid.frames_for_latent(1)


@pytest.mark.parametrize(
    "shapes, fault",
    [
        ([(1, 24, 2, 4, 4), (1, 32, 2, 8)], None),
        ([(2, 24, 2, 4, 4), (2, 32, 2, 8)], None),
        ([(1, 16, 2, 8, 8)], "it has 1 stream"),
        ([(1, 128, 2, 4, 4), (1, 32, 2, 8)], r"its video stream is \[1, 128, 2, 4, 4\]"),
        ([(1, 24, 2, 4, 4), (1, 8, 8, 16)], r"its sound stream is \[1, 8, 8, 16\]"),
    ],
)
def test_latents_of_other_models(shapes, fault):
    found = grid.latent_fault(shapes)
    if fault is None:
        assert found is None
    else:
        assert re.search(fault, found)


def test_rows_without_conditions():
    rows = grid.segment_rows(12, (1, 24, 37, 48, 84), (1, 32, 2, 207))
    assert rows == {"text": 12, "audio": 414, "video": 37 * 24 * 42}

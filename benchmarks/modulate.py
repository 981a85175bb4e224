"""``run.py bench modulate``: modulation in one launch against ``mul_`` and ``add_`` per segment."""

from .op_cases import bench


def main(argv):
    return bench("modulate", ("modulate",), argv, __doc__)

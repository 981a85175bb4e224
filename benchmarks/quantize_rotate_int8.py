"""``python benchmarks quantize_rotate_int8``: rotate and quantise (out_proj's 7168 columns, and 5376 alone) against kitchen's kernel."""

from .int8_cases import bench


def main(argv):
    return bench(
        "quantize_rotate_int8", [("quantize_rotate_int8", {"width": 7168}), ("quantize_rotate_int8", {"width": 5376})], argv, __doc__)

"""``run.py bench quantize_rotate_int8``: rotate and quantise out_proj's 7168 columns, against kitchen's kernel."""

from .op_cases import bench


def main(argv):
    return bench("quantize_rotate_int8", ("quantize_rotate_int8",), argv, __doc__)

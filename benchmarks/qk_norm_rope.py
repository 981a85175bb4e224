"""``run.py bench qk_norm_rope``: per-head RMSNorm and RoPE on the qkv buffer against comfy-kitchen's kernel."""

from .op_cases import bench


def main(argv):
    return bench("qk_norm_rope", ("qk_norm_rope",), argv, __doc__)

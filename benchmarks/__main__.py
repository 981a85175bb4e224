"""``run.py bench NAME ...``, under a Python that has torch: one benchmark of the pack (``run.py bench NAME --help``: its options)."""

import difflib
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Each has main(argv) -> exit code.
NAMES = (
    "step", "diffusers_step", "turbo", "block", "trajectory", "compare", "gemm", "attention", "check", "kernels", "tables",
    "registry", "plot",
    "norm_modulate", "gate_norm_modulate", "qk_norm_rope", "modulate", "gate", "swiglu",
    "nvfp4_quantize", "modulate_nvfp4", "swiglu_nvfp4",
    "quantize_rotate_int8", "swiglu_int8", "norm_modulate_int8",
)  # fmt: skip


def main(argv):
    if argv[1:2] == ["--compare"]:  # python benchmarks step --compare A.json B.json
        argv = ["compare", *argv[2:]]
    if not argv or argv[0] not in NAMES:
        print(f"usage: run.py bench {{{','.join(NAMES)}}} ...", file=sys.stderr)
        if argv:
            near = difflib.get_close_matches(argv[0], NAMES)
            print(f"unknown benchmark {argv[0]}" + (f"; near it: {', '.join(near)}" if near else ""), file=sys.stderr)
        return 2
    # Running a folder puts that folder first on sys.path; a `step` or `block` importable at top level helps nobody.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.util.spec_from_file_location("_h3_vortex_loader", HERE / "_pack.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    loader.load_pack()
    return importlib.import_module(f"h3_vortex.benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

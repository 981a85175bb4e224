"""The demo where there is no ComfyUI: a tiny random model in diffusers, the same clip with and without this pack's kernels."""

import json
import sys
import time

EXPECTED_EQUAL = "patched == stock: equal"


def run(out, cpu=False):
    """Make the clip twice from one seed, compare every byte, save the one that the kernels made; returns the exit status."""
    import torch

    from ..h3 import embedded
    from ..kernels.patch.ops import Features
    from .cmd_demo import EXPECTED, describe_video

    began = time.monotonic()
    cuda = torch.cuda.is_available() and not cpu
    print(f"Making a random-weight H3 in diffusers on the {torch.cuda.get_device_name() if cuda else 'CPU'} ...", flush=True)
    engine = embedded.open_engine(device="cuda" if cuda else "cpu")
    request = embedded.Request("a lighthouse in a storm, waves and wind", width=96, height=64, seconds=2.0, steps=4)
    # Without an accelerator the ops' references run in the blocks: slower than stock, but the same path through this pack.
    ours = engine.generate(request, features=Features(allow_eager=not cuda))
    stock = engine.generate(request, accelerated=False)
    path = out / "h3_vortex_demo.mp4"
    embedded.write_mp4(path, ours)
    path.with_suffix(".json").write_text(json.dumps(ours.record, indent=1) + "\n", encoding="utf-8")
    ops = ours.record["kernels"]["ops"]
    for name, calls in ops.items():
        print(f"  {name}: {sum(calls['fused'].values())} calls by {', '.join(calls['fused']) or 'none'}; "
              f"{sum(calls['stock'].values())} as in stock")  # fmt: skip
    found = describe_video(path)
    print(f"\n{path}\n{found['text']}; {time.monotonic() - began:.0f} s in all; record in {path.with_suffix('.json')}")
    wrong = {key: found[key] for key, value in EXPECTED.items() if found[key] != value}
    if wrong:
        print(f"run.py demo: the file is not as expected: {wrong} instead of {EXPECTED}", file=sys.stderr)
        return 1
    if not any(calls["fused"] for calls in ops.values()):
        print(f"run.py demo: no op of this pack ran: {ours.record['kernels']['stepped_aside']}", file=sys.stderr)
        return 1
    same = embedded.equal(ours, stock)
    print(EXPECTED_EQUAL if same else "patched == stock: DIFFERENT; please report this with the record")
    return 0 if same else 1

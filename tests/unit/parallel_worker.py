"""One rank of ``test_generate.test_two_ranks``, started by torchrun: ``parallel_worker.py FOLDER``. Writes ``FOLDER/rankN.json``."""

import argparse
import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path


def main(folder):
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.util.spec_from_file_location("_h3_vortex_conftest", root / "tests" / "conftest.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    import torch
    from h3_vortex.frontdoor import cmd_generate
    from h3_vortex.h3 import embedded, embedded_tiny
    from h3_vortex.kernels.patch import diffusers as host
    from h3_vortex.kernels.patch.ops import Features
    from h3_vortex.tests.unit import h3_jobs

    rank, found = int(os.environ["RANK"]), {}
    torch.distributed.init_process_group("gloo")
    model = embedded_tiny.transformer()
    embedded.enable_parallelism(model, torch.device("cpu"))
    arguments = h3_jobs.arguments("first frame", model)

    def digest():
        with torch.no_grad():
            outputs = model(**arguments)
        torch.save(outputs, folder / f"rank{rank}.pt")
        return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in outputs)).hexdigest()

    found["stock"] = digest()
    with host.accelerate(model, Features(allow_eager=True)) as handle:
        found["patched"] = digest()
        found["again"] = digest()
    found["undone"] = digest()
    report = handle.report()
    found["ops"], found["rows"] = report["ops"], report["packed_rows"]

    parser = argparse.ArgumentParser()
    cmd_generate.add_arguments(parser)
    line = ["--prompt", "a foxy", "--seconds", "1", "--steps", "2", "--device", "cpu", "--parallel", "2", "--out", str(folder / "two.mp4")]
    found["generate"] = cmd_generate.generate(parser.parse_args(line), rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

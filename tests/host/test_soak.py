"""Many jobs through one server: formats, LoRAs, the patch on and off, cancels. Every byte as in its reference, and memory flat.

H3_SOAK_JOBS=200 runs so many (the default is a short version), and then makes every reference again in a fresh server.
"""

import json
import os
import random
from dataclasses import replace

import pytest
from h3_vortex.tests.host import soak, test_accelerate_http
from h3_vortex.tests.host.sampling import fused_forms

JOBS = int(os.environ.get("H3_SOAK_JOBS", "0"))
FORMATS = soak.FORMATS if JOBS else soak.FORMATS[:2]
BATCH = 5
base = test_accelerate_http.base


@pytest.mark.slow
def test_soak(start_server, base):
    rng, soak_base = random.Random(7), soak.add_nodes(base)
    jobs = [soak.random_job(rng, FORMATS, 2) for _ in range(JOBS)]
    if not JOBS:  # each LoRA accelerated, one job cancelled and then run, one repeated
        nvfp4, int8 = FORMATS
        jobs = [
            soak.Job(nvfp4, "core", 0, True), soak.Job(int8, "turbo", 1, True), soak.Job(nvfp4, "core", 0, True, cancel_at=1),
            soak.Job(int8, "none", 1, True), soak.Job(nvfp4, "core", 0, True), soak.Job(int8, "turbo", 1, False),
        ]  # fmt: skip
    references, figures = {}, {"jobs": len(jobs), "equal": 0, "interrupted": 0, "accelerated": 0, "fused_calls": 0}
    with start_server(*soak.FLAGS, base=soak_base) as server:
        started = len(server.log)
        wanted = list({job.result: job.stock for job in jobs if job.cancel_at is None}.values())
        for job, (digest, _) in zip(wanted, soak.run_all(server, wanted), strict=True):
            references[job.result] = digest
        assert len({tuple(digest) for digest in references.values()}) == len(references), "different jobs give the same bytes"
        marks = [soak.memory(server)]
        for start in range(0, len(jobs), BATCH):
            batch = jobs[start : start + BATCH]
            for job, (digest, report) in zip(batch, soak.run_all(server, batch), strict=True):
                if digest is None:
                    figures["interrupted"] += 1
                    continue
                if job.result not in references:  # a job that was finished before its cancel arrived
                    assert job.cancel_at is not None
                    ((references[job.result], _),) = soak.run_all(server, [replace(job, accelerate=False, cancel_at=10**6)])
                assert digest == references[job.result], f"{job} is not stock's"
                figures["equal"] += 1
                if job.accelerate:
                    figures["accelerated"] += 1
                    figures["fused_calls"] += fused_forms(report, "gate_norm_modulate")
                    assert report["stepped_aside"] is None
            if JOBS and (start // BATCH) % 10 == 9:
                marks.append(soak.memory(server))
        marks.append(soak.memory(server))
        status, body = server.get("/h3_vortex/status")
        assert status == 200 and len(body["models"]) <= 1, "sessions of models that are gone pile up"
        assert "Traceback" not in server.log[started:], server.tail(60)
    assert figures["equal"] + figures["interrupted"] == len(jobs) and figures["accelerated"] and figures["fused_calls"]
    assert all(mark["tensor_bytes"] == marks[0]["tensor_bytes"] for mark in marks), marks
    assert marks[-1]["rss"] - marks[0]["rss"] < 64 << 20, marks  # 200 jobs: 6 MiB measured
    assert marks[-1]["files"] <= marks[0]["files"] + 2 and marks[-1]["threads"] <= marks[0]["threads"] + 2, marks
    print(json.dumps({**figures, "references": len(references), "memory": marks}))
    if not JOBS:
        return
    assert figures["interrupted"] >= JOBS // 20
    with start_server(*soak.FLAGS, base=soak_base) as fresh:
        for job, (digest, _) in zip(wanted, soak.run_all(fresh, wanted), strict=True):
            assert digest == references[job.result], f"{job}: a fresh process gives other bytes"

"""Random jobs on the tiny models for a server with the test nodes, and running several of them at once, some cancelled on the way."""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from h3_vortex.frontdoor.client import Client
from h3_vortex.frontdoor.server import PACK_FOLDER
from h3_vortex.tests.host.test_accelerate_http import TEST_NODES, graph

SOAK_NODES = "h3_soak_nodes"
# ComfyUI's default cache would answer a job that ran before without running it; this one keeps the last job only
FLAGS = ("--whitelist-custom-nodes", PACK_FOLDER, TEST_NODES, SOAK_NODES, "--cache-classic")
FORMATS = ("pruned_nvfp4", "pruned_int8_convrot", "pruned_bf16")
LORAS = ("none", "core", "turbo")
LONG = 400  # steps of a job that is to be cancelled: more than are done by the time the cancel arrives


@dataclass(frozen=True)
class Job:
    """``cancel_at``: the step at which it is cancelled, or None."""

    form: str
    lora: str
    seed: int
    accelerate: bool
    cancel_at: int | None = None

    @property
    def result(self):
        """What its output depends on: jobs that agree here must agree in every byte."""
        return self.form, self.lora, self.seed, self.cancel_at is not None

    @property
    def stock(self):
        return Job(self.form, self.lora, self.seed, False, self.cancel_at)

    def graph(self):
        nodes = graph(self.form, accelerate="H3TestEager" if self.accelerate else None, lora=self.lora == "core")
        if self.lora == "turbo":
            inputs = {
                "model": ["loader", 0], "lora": "random.safetensors", "strength": 1.0, "preset": "8 steps, 12/3", "steps": 0,
                "shift_video": 0.0, "shift_audio": 0.0, "adaln_source": "none"}  # fmt: skip
            last = "accelerate" if self.accelerate else None
            users = [last] if last else ["guider", "sigmas", "result"]
            for user in users:
                nodes[user]["inputs"]["model"] = ["turbo", 0]
            nodes["turbo"] = {"class_type": "H3VortexTurboLora", "inputs": inputs}
        nodes["noise"]["inputs"]["noise_seed"] = self.seed
        if self.cancel_at is not None:
            nodes["sigmas"]["inputs"]["steps"] = LONG
        return nodes


def add_nodes(base):
    """Put this file's node into a base directory that already has the others."""
    folder = base / "custom_nodes" / SOAK_NODES
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "soak_nodes" / "__init__.py", folder)
    return base


def random_job(rng, formats=FORMATS, seeds=4):
    cancel = rng.randrange(1, 6) if rng.random() < 0.15 else None
    return Job(rng.choice(formats), rng.choice(LORAS), rng.randrange(seeds), rng.random() < 0.6, cancel)


def run_all(server, jobs):
    """Queue all of them at once. Returns, in order, ``(sha256 list or None when it was interrupted, report or None)``."""

    async def one(job):
        async with Client(server.url) as client:
            asked = []

            def watch(kind, data):
                if kind == "progress" and job.cancel_at is not None and data["value"] >= job.cancel_at and not asked:
                    asked.append(asyncio.create_task(client.post("/interrupt", {"prompt_id": data["prompt_id"]})))

            result = await client.queue(job.graph(), timeout=600, on_event=watch)
            await asyncio.gather(*asked)
        if result.interrupted:
            assert job.cancel_at is not None, "a job was interrupted that nobody cancelled"
            return None, None
        assert result.ok, f"{job}: {result.message()}"
        told = json.loads(result.outputs["result"]["text"][0])
        return told["sha256"], told["report"]

    async def every():
        return await asyncio.gather(*(one(job) for job in jobs))

    return asyncio.run(every())


def memory(server):
    """What the server holds when nothing is loaded and nothing is cached: see ``soak_nodes``."""
    status, body = server.post("/free", {"unload_models": True, "free_memory": True})
    assert status == 200, body
    for _ in range(2):  # the flags are read when a job ends
        result = server.queue({"memory": {"class_type": "H3TestMemory", "inputs": {}}}, timeout=60)
        assert result.ok, result.message()
    return json.loads(result.outputs["memory"]["text"][0])

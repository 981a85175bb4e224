"""Many jobs from one graph: over prompts and seeds, one after the other, with a record of each, through restarts of the server."""

import asyncio
import copy
import hashlib
import json
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

PROMPTS, SEEDS = ("prompt",), ("seed", "noise_seed")


class JobsError(ValueError):
    """Prompts, seeds or records that cannot be used; the message says which and why."""


@dataclass
class Job:
    """``graph``: API format. ``changes``: what makes it another job than its neighbours."""

    graph: dict
    changes: dict

    @property
    def key(self):
        """The same for the same graph, in any session."""
        return hashlib.sha256(json.dumps(self.graph, sort_keys=True).encode()).hexdigest()


def parse_seeds(text):
    """``"1-3,9"`` -> [1, 2, 3, 9]. Raises :class:`JobsError`."""
    seeds = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise JobsError(f"--seeds {text!r}: {part.strip()!r} is neither a number nor a range such as 1-8")
        if dash and int(last) < int(first):
            raise JobsError(f"--seeds {text!r}: {part.strip()} runs backwards")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def read_prompts(path):
    """One prompt a line; empty lines and lines that begin with # do not count. Raises :class:`JobsError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise JobsError(f"--prompts {path}: {error.strerror}") from None
    prompts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not prompts:
        raise JobsError(f"--prompts {path}: there is no prompt in it")
    return prompts


def make_jobs(graph, prompts=None, seeds=None):
    """A :class:`Job` for every prompt and seed; None leaves what the graph has. Raises :class:`JobsError` when it has no place for them."""
    places = {"prompt": _inputs(graph, PROMPTS, prompts), "seed": _inputs(graph, SEEDS, seeds)}
    jobs = []
    for prompt in prompts or [None]:
        for seed in seeds or [None]:
            changes = {name: value for name, value in (("prompt", prompt), ("seed", seed)) if value is not None}
            made = copy.deepcopy(graph)
            for name, value in changes.items():
                for node, given in places[name]:
                    made[node]["inputs"][given] = value
            jobs.append(Job(made, changes))
    return jobs


def _inputs(graph, names, wanted):
    if not wanted:
        return []
    found = [(node, name) for node, entry in graph.items() for name in names if not isinstance(entry["inputs"].get(name, []), list)]
    if not found:
        raise JobsError(f"no node of the workflow has an input {' or '.join(names)} with a value of its own")
    return found


def finished_keys(path):
    """Keys of the jobs that the records at ``path`` call ok and whose files are all still there."""
    keys = set()
    if not Path(path).exists():
        return keys
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if record["ok"] and all(Path(file).is_file() for file in record["files"]):
                keys.add(record["key"])
        except (ValueError, KeyError, TypeError):
            # The last line of a session that was killed while it wrote.
            print(f"{path}: line {number} is no record; its job runs again", file=sys.stderr)
    return keys


class Runner:
    """Runs jobs one after the other on one server.

    client: an open ``Client``. queue: ``async (client, graph, prompt_id) -> Result``. save: ``async (client, result) -> paths``.
    records: file that gets a JSON line per job, or None. wait: seconds to wait for a server that has gone.
    retries: how often one job is queued again after the server went away under it.
    """

    def __init__(self, client, queue, save, records=None, wait=300.0, retries=2):
        self.client, self.queue, self.save = client, queue, save
        self.records, self.wait, self.retries = records, wait, retries

    async def run(self, jobs):
        """Yields (job, result or None for one that was finished before, paths) as they come. A failed job does not stop the others."""
        before = finished_keys(self.records) if self.records else set()
        status, _ = await self.client.get("/system_stats")  # a server that was never there is not waited for
        if status != 200:
            raise ConnectionError(f"{self.client.url} answers, but not as a ComfyUI server: /system_stats gives HTTP {status}")
        for number, job in enumerate(jobs, 1):
            if len(jobs) > 1 or job.key in before:
                state = "finished before" if job.key in before else ""
                print(f"Job {number} of {len(jobs)} {json.dumps(job.changes, ensure_ascii=False)} {state}".rstrip(), file=sys.stderr)
            if job.key in before:
                yield job, None, []
                continue
            began = time.time()
            result, paths, attempts = await self._one(job)
            if self.records:
                self._write(number, job, result, paths, attempts, began)
            yield job, result, paths

    async def _one(self, job):
        """(result, paths, attempts). A job that the server finished before it went away, or before the line broke, is only fetched."""
        import aiohttp

        attempts, prompt_id = 0, None
        while True:
            attempts += 1
            try:
                result = await self.client.finished(prompt_id) if prompt_id else None
                if result is None:
                    prompt_id = str(uuid.uuid4())
                    result = await self._queue(job, prompt_id)
                return result, await self.save(self.client, result), attempts
            except (aiohttp.ClientError, ConnectionError) as error:
                if attempts > self.retries:
                    raise
                print(f"The server went away ({error}); waiting up to {self.wait:.0f} s for it", file=sys.stderr)
                await self._until_it_answers(error)

    async def _queue(self, job, prompt_id):
        try:
            return await self.queue(self.client, job.graph, prompt_id)
        except asyncio.CancelledError:
            # Ctrl-C: our job, waiting or running, must not stay behind.
            await asyncio.wait_for(self.client.cancel(prompt_id), 10)
            raise

    async def _until_it_answers(self, error):
        import aiohttp

        end = time.monotonic() + self.wait
        while time.monotonic() < end:
            try:
                status, _ = await self.client.get("/system_stats")
                if status == 200:
                    return
            except (aiohttp.ClientError, ConnectionError):
                pass  # not yet
            await asyncio.sleep(1)
        raise ConnectionError(f"no server at {self.client.url} for {self.wait:.0f} s after: {error}") from None

    def _write(self, number, job, result, paths, attempts, began):
        record = {
            "job": number, "key": job.key, **job.changes, "ok": result.ok, "prompt_id": result.prompt_id, "attempts": attempts,
            "began": round(began, 3), "seconds": round(time.time() - began, 3), "files": [str(Path(path).absolute()) for path in paths],
            "nodes": {node: [_parsed(text) for text in ui["text"]] for node, ui in result.outputs.items() if ui.get("text")},
        }  # fmt: skip
        if not result.ok:
            record["error"] = result.message()
        Path(self.records).parent.mkdir(parents=True, exist_ok=True)
        with open(self.records, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _parsed(text):
    """JSON that a node reported as an object, other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text

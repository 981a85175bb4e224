"""``run.py queue`` with many jobs: prompts, seeds, records, and a server that goes away."""

import asyncio
import json

import pytest
from h3_vortex.frontdoor import jobs
from h3_vortex.frontdoor.client import Result
from h3_vortex.frontdoor.progress import pace

GRAPH = {
    "1": {"class_type": "H3VortexConditioning", "inputs": {"prompt": "a", "clip": ["9", 1]}},
    "2": {"class_type": "H3VortexDenoise", "inputs": {"seed": 1}},
    "3": {"class_type": "RandomNoise", "inputs": {"noise_seed": 1}},
    "4": {"class_type": "Other", "inputs": {"prompt": ["1", 0], "seed": ["3", 0]}},
}


def test_seeds():
    assert jobs.parse_seeds("1-3, 9,12-12") == [1, 2, 3, 9, 12]


@pytest.mark.parametrize(
    "text, says", [("a", "'a' is neither"), ("1-", "'1-' is neither"), ("", "'' is neither"), ("5-2", "runs backwards")]
)
def test_bad_seeds(text, says):
    with pytest.raises(jobs.JobsError, match=says):
        jobs.parse_seeds(text)


def test_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("# mine\n\n one fox \ntwo föxes\n", encoding="utf-8")
    assert jobs.read_prompts(tmp_path / "p.txt") == ["one fox", "two föxes"]
    (tmp_path / "none.txt").write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(jobs.JobsError, match="no prompt"):
        jobs.read_prompts(tmp_path / "none.txt")
    with pytest.raises(jobs.JobsError, match="absent.txt"):
        jobs.read_prompts(tmp_path / "absent.txt")


def test_a_job_for_every_prompt_and_seed():
    made = jobs.make_jobs(GRAPH, ["x", "y"], [7, 8])
    assert [job.changes for job in made] == [{"prompt": p, "seed": s} for p in "xy" for s in (7, 8)]
    last = made[-1].graph
    assert last["1"]["inputs"]["prompt"] == "y" and last["2"]["inputs"]["seed"] == last["3"]["inputs"]["noise_seed"] == 8
    assert last["4"] == GRAPH["4"]  # what is connected stays connected
    assert len({job.key for job in made}) == 4 and GRAPH["2"]["inputs"]["seed"] == 1
    assert jobs.make_jobs(GRAPH)[0].graph == GRAPH
    with pytest.raises(jobs.JobsError, match="no node of the workflow has an input seed or noise_seed"):
        jobs.make_jobs({"1": GRAPH["1"]}, seeds=[1])


class Server:
    """Stands in for the client: goes away ``falls`` times while a job runs; with ``kept``, has finished it all the same."""

    url = "http://server"

    def __init__(self, falls=0, kept=False):
        self.falls, self.kept, self.queued, self.cancelled = falls, kept, [], []

    async def get(self, path):
        return 200, {}

    async def finished(self, prompt_id):
        return Result(prompt_id, {"9": {"text": ['{"steps": 2}', "plain"]}}) if self.kept else None

    async def cancel(self, prompt_id):
        self.cancelled.append(prompt_id)

    async def queue(self, _, graph, prompt_id):
        self.queued.append((graph["2"]["inputs"]["seed"], prompt_id))
        if self.falls:
            self.falls -= 1
            raise ConnectionError("closed")
        return Result(prompt_id, {"9": {"text": ['{"steps": 2}', "plain"]}})


def run(server, made, folder, **more):
    async def save(_, result):
        path = folder / f"{result.prompt_id}.mp4"
        path.touch()
        return [path]

    async def collect():
        runner = jobs.Runner(server, server.queue, save, folder / "runs.jsonl", **more)
        return [item async for item in runner.run(made)]

    return asyncio.run(collect())


def test_records_and_what_is_finished_is_not_run_again(tmp_path):
    made, server = jobs.make_jobs(GRAPH, seeds=[1, 2]), Server()
    run(server, made[:1], tmp_path)
    (record,) = map(json.loads, (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines())
    assert record["ok"] and record["seed"] == 1 and record["attempts"] == 1 and record["nodes"] == {"9": [{"steps": 2}, "plain"]}
    done = run(server, made, tmp_path)
    assert [seed for seed, _ in server.queued] == [1, 2] and done[0][1] is None and done[1][1].ok
    (tmp_path / record["files"][0]).unlink()
    with open(tmp_path / "runs.jsonl", "a", encoding="utf-8") as file:
        file.write('{"ok": tr')  # killed while it wrote
    run(server, made, tmp_path)
    assert [seed for seed, _ in server.queued] == [1, 2, 1]


def test_a_server_that_goes_away_gets_the_job_again(tmp_path, capsys):
    server = Server(falls=2)
    ((_, result, paths),) = run(server, jobs.make_jobs(GRAPH), tmp_path)
    assert result.ok and len(server.queued) == 3 and len(paths) == 1
    assert "The server went away (closed)" in capsys.readouterr().err
    with pytest.raises(ConnectionError):
        run(Server(falls=3), jobs.make_jobs(GRAPH, seeds=[5]), tmp_path)


def test_a_job_that_was_finished_when_the_line_broke_is_only_fetched(tmp_path):
    server = Server(falls=1, kept=True)
    ((_, result, _),) = run(server, jobs.make_jobs(GRAPH), tmp_path)
    assert len(server.queued) == 1 and result.prompt_id == server.queued[0][1]


def test_an_interrupt_takes_the_job_back(tmp_path):
    server = Server()

    async def queue(_, graph, prompt_id):
        server.queued.append(prompt_id)
        raise asyncio.CancelledError

    server.queue = queue
    with pytest.raises(asyncio.CancelledError):
        run(server, jobs.make_jobs(GRAPH), tmp_path)
    assert server.cancelled == server.queued and not (tmp_path / "runs.jsonl").exists()


def test_pace():
    assert pace(1, 20, 1, 5.0, 5.0) == "step 1/20"
    assert pace(5, 20, 1, 5.0, 13.0) == "step 5/20, 2 s a step, 30 s left"

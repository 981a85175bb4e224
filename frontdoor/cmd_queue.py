"""Queue a workflow on a running ComfyUI server and download what it makes.

FILE.json is in the API format (in ComfyUI: Workflow > Export (API)). A node is named by its id, its title, or its class
when only one node has it:

  run.py queue workflows/api/text_to_video.json --set 'H3 Conditioning.prompt=A red fox in the snow' --set 'H3 Packed Denoiser.seed=7'

Many jobs: a job for every line of a file and every seed, one after the other, with a JSON line for each. The same command
again leaves out what is finished; a server that restarts in between is waited for.

  run.py queue workflows/api/text_to_video.json --prompts prompts.txt --seeds 1-4 --records runs.jsonl
"""

import asyncio
import json
import sys
from pathlib import Path

from . import environment, interpreter, locate
from .jobs import JobsError, Runner, make_jobs, parse_seeds, read_prompts

HELP = "queue a workflow file on a running server and download the outputs"


class UsageError(ValueError):
    """A --set or FILE.json that does not fit; the message names it and what would fit."""


def add_arguments(parser):
    parser.add_argument("file", metavar="FILE.json", help="workflow in API format")
    parser.add_argument("--url", default="http://127.0.0.1:8188", help="the server (default: %(default)s)")
    parser.add_argument("--set", metavar="NODE.INPUT=VALUE", action="append", default=[], help="change an input; repeatable")
    parser.add_argument(
        "--upload",
        metavar="NODE.INPUT=FILE",
        action="append",
        default=[],
        help="put a local file into the server's input folder and set the input to its name; repeatable",
    )
    parser.add_argument("--out", metavar="DIR", default="output", help="where files go (default: ./output); nothing is overwritten")
    parser.add_argument("--prompts", metavar="FILE.txt", help="a job for every line of it, as every 'prompt' of the workflow")
    parser.add_argument("--seeds", metavar="1-4,9", help="a job for every seed, as every 'seed' of the workflow")
    parser.add_argument("--records", metavar="FILE.jsonl", help="append a record of each job; jobs that it calls ok are not run again")
    parser.add_argument("--wait", type=float, default=300, metavar="S", help="for a server that went away (default: %(default)s)")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="of one job after the server went away (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600, metavar="S", help="give up after so many seconds (default: %(default)s)")


def run(args):
    python = _client_python()
    if not interpreter.is_this(python):
        return interpreter.go_on(python, "queue", sys.argv[2:])
    try:
        graph = load_graph(args.file)
        added = {}  # inputs that the file does not have: the server is asked whether its nodes do
        for assignment in (*args.set, *args.upload):
            node, name, _ = parse_assignment(assignment, graph)
            if name not in graph[node]["inputs"]:
                added[node, name] = assignment
        for assignment in args.set:
            node, name, value = parse_assignment(assignment, graph)
            graph[node]["inputs"][name] = parse_value(value, graph[node]["inputs"].get(name), assignment)
        uploads = [(*parse_assignment(assignment, graph)[:2], assignment.split("=", 1)[1]) for assignment in args.upload]
        for *_, path in uploads:
            if not Path(path).is_file():
                raise UsageError(f"--upload: there is no file {path}")
        prompts, seeds = args.prompts and read_prompts(args.prompts), args.seeds and parse_seeds(args.seeds)
        make_jobs(graph, prompts, seeds)
    except (UsageError, JobsError) as error:
        print(f"run.py queue: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_queue(graph, added, uploads, prompts, seeds, args))


async def _queue(graph, added, uploads, prompts, seeds, args):
    import aiohttp

    from .client import Client

    async with Client(args.url) as client:
        try:
            for (node, name), assignment in added.items():
                kind = graph[node]["class_type"]
                _, classes = await client.get(f"/object_info/{kind}")
                problem = input_problem(name, assignment, kind, classes.get(kind) if isinstance(classes, dict) else None)
                if problem is not None:
                    print(f"run.py queue: {problem}", file=sys.stderr)
                    return 2
            for node, name, path in uploads:
                graph[node]["inputs"][name] = await client.upload(path)
            runner = Runner(
                client,
                lambda client, graph, prompt_id: run_graph(client, graph, args.timeout, prompt_id),
                lambda client, result: save_outputs(client, result, args.out),
                args.records, args.wait, args.retries,
            )  # fmt: skip
            jobs, failed = make_jobs(graph, prompts, seeds), 0
            async for _, result, paths in runner.run(jobs):
                for line in (*paths, *(result.texts() if result is not None and len(jobs) == 1 else ())):
                    print(line, flush=True)
                if result is not None and not result.ok:
                    failed += 1
                    print(f"run.py queue: {result.message()}", file=sys.stderr)
        except aiohttp.InvalidURL:
            raise ConnectionError(f"--url {args.url}: not an address such as http://127.0.0.1:8188") from None
        except aiohttp.ClientConnectorError as error:
            raise ConnectionError(f"no server answers at {args.url}: {error.os_error.strerror or error}") from None
    return 1 if failed else 0


def input_problem(name, assignment, kind, info):
    """Why a node of class ``kind`` takes no input ``name`` (which a server would ignore in silence), or None.

    ``info``: the server's account of the class, None when it does not know it (its own refusal then says so). The inputs of a group
    are named GROUP.NAME.
    """
    if info is None:
        return None
    known = [entry for group in ("required", "optional") for entry in info["input"].get(group, {})]
    if name in known or name.split(".")[0] in known:
        return None
    return f"{assignment!r}: {kind} has no input {name!r}; it has {', '.join(known)}"


async def run_graph(client, graph, timeout, prompt_id=None):
    """Queue ``graph`` with a progress display; returns the ``Result``."""
    from .progress import Progress

    with Progress(graph) as progress:
        clock = asyncio.create_task(progress.keep_time())
        try:
            return await client.queue(graph, timeout=timeout, on_event=progress, prompt_id=prompt_id)
        finally:
            clock.cancel()


async def save_outputs(client, result, folder):
    """Download every saved output (previews only when nothing was saved) into ``folder``; returns the paths."""
    entries = [entry for _, entry in result.files()]
    saved = [entry for entry in entries if entry.get("type") == "output"]
    return [await client.download(entry, folder) for entry in saved or entries]


def load_graph(path):
    """Read an API-format workflow. Raises :class:`UsageError` for anything else."""
    try:
        graph = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    if isinstance(graph, dict) and "nodes" in graph and "links" in graph:
        raise UsageError(f"{path} is a workflow for the canvas; a server takes the API format: Workflow > Export (API)")
    if not isinstance(graph, dict) or not graph:
        raise UsageError(f"{path} is no API-format workflow (an object of nodes by id)")
    for node, entry in graph.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("inputs"), dict) or not isinstance(entry.get("class_type"), str):
            raise UsageError(f"{path}: node {node} has no class_type and inputs, so this is no API-format workflow")
        if not isinstance(entry.get("_meta", {}), dict):
            raise UsageError(f"{path}: _meta of node {node} is no object, so this is no API-format workflow")
    return graph


def parse_assignment(text, graph):
    """Split ``NODE.INPUT=VALUE``; returns (node id, input name, value text). Raises :class:`UsageError`.

    The node name ends at the last dot before ``=`` that leaves a known node: titles and input names may hold dots.
    """
    target, equals, value = text.partition("=")
    if not equals or "." not in target:
        raise UsageError(f"{text!r} is not NODE.INPUT=VALUE")
    dots = [i for i, char in enumerate(target) if char == "."]
    for dot in reversed(dots):
        nodes = _nodes_named(target[:dot], graph)
        if len(nodes) > 1:
            raise UsageError(f"{target[:dot]!r} names {len(nodes)} nodes; use an id: {', '.join(nodes)}")
        if nodes and target[dot + 1 :]:
            return nodes[0], target[dot + 1 :], value
    known = ", ".join(f"{node} ({_title(entry)}{entry['class_type']})" for node, entry in graph.items())
    raise UsageError(f"{text!r}: no such node; there are {known}")


def parse_value(text, present, assignment):
    """The new value for an input that holds ``present``: text stays text, a number, boolean or link is read as JSON."""
    if isinstance(present, str):
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(present, (bool, int, float)) and not isinstance(value, (bool, int, float, list)):
        raise UsageError(f"{assignment!r}: the input holds {json.dumps(present)}, so a value of type {type(present).__name__} is needed")
    return value


def _title(entry):
    title = (entry.get("_meta") or {}).get("title")
    return f"{title!r}, " if title else ""


def _nodes_named(name, graph):
    if name in graph:
        return [name]
    titled = [node for node, entry in graph.items() if (entry.get("_meta") or {}).get("title") == name]
    return titled or [node for node, entry in graph.items() if entry["class_type"] == name]


def _client_python():
    """An interpreter with aiohttp and tqdm: this one, our .venv, or one that runs the found ComfyUI."""
    tree = locate.find_comfyui()
    venv = environment.venv_python(environment.ROOT / ".venv")
    candidates = [sys.executable, *([venv] if venv.exists() else []), *(locate.pythons_of(tree) if tree else [])]
    for python in candidates:
        if not locate.missing_modules(python, ("aiohttp", "tqdm")):
            return python
    raise environment.SetupError("this needs the packages aiohttp and tqdm: install them, or run `run.py setup` first.")

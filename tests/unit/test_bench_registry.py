"""The registry of experiments: its form, that what it points at is there, and what ``registry`` prints."""

import json
import re
import subprocess
import sys

import pytest
from h3_vortex.benchmarks import registry
from h3_vortex.benchmarks._pack import ROOT

REGISTRY = registry.load()
EXPERIMENTS = REGISTRY["experiments"]
OWN = [entry for entry in EXPERIMENTS if entry["origin"] == "own"]


def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="the registry is checked with jsonschema (requirements/test-tools.txt)")
    schema = json.loads(registry.SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_registry_follows_its_schema():
    assert [error.message for error in validator().iter_errors(REGISTRY)] == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda own, founding: own.update(status="accepted"),
        lambda own, founding: own.update(results=[]),
        lambda own, founding: own.update(reproducer=["make it so"]),
        lambda own, founding: own.update(results=["results/kernels.json"]),
        lambda own, founding: own.pop("decision"),
        lambda own, founding: own.update(id="founding-mine"),
        lambda own, founding: founding.pop("source"),
        lambda own, founding: founding.update(results=["benchmarks/results/kernels-h200.json"]),
    ],
)
def test_the_schema_refuses(spoil):
    spoilt = json.loads(json.dumps(REGISTRY))
    own = next(e for e in spoilt["experiments"] if (e["origin"], e["status"]) == ("own", "production_accepted"))
    spoil(own, next(e for e in spoilt["experiments"] if e["origin"] == "founding"))
    assert list(validator().iter_errors(spoilt))


def test_ids_are_unique():
    ids = [entry["id"] for entry in EXPERIMENTS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("entry", OWN, ids=[entry["id"] for entry in OWN])
def test_what_an_experiment_points_at_is_there(entry):
    for path in entry["code"] + entry["results"]:
        assert (ROOT / path).is_file(), path
    assert {figure["file"] for figure in entry["figures"]} <= set(entry["results"])
    for figure in entry["figures"]:
        assert isinstance(registry.read_figure(figure), (int, float))
    for path in entry["results"]:
        result = json.loads((ROOT / path).read_text(encoding="utf-8"))
        assert result["speed_valid"], f"{path} is a harness check, no evidence"


def test_accepted_ops_have_no_differing_element():
    figures = [f for e in OWN if e["status"] == "production_accepted" for f in e["figures"] if "differing" in f["value"]]
    assert len(figures) > 8
    assert {f["what"]: registry.read_figure(f) for f in figures if registry.read_figure(f)} == {}


def test_reproducers_name_benchmarks_and_tests_that_exist():
    listed = subprocess.run([sys.executable, str(ROOT / "benchmarks")], capture_output=True, text=True).stderr
    names = set(re.search(r"{(.*)}", listed)[1].split(","))
    for entry in OWN:
        for command in entry["reproducer"]:
            words = command.split()
            if words[2] == "bench":
                assert words[3] in names, command
            else:
                tier = words[words.index("--tier") + 1]
                keys = re.findall(r"\w+", command.partition(" -k ")[2].replace(" or ", " "))
                files = list((ROOT / "tests" / tier).glob("test_*.py"))
                text = " ".join(path.name for path in files) + "".join(path.read_text(encoding="utf-8") for path in files)
                assert all(key in text for key in keys), command


def test_references_between_entries_lead_somewhere():
    ids = {entry["id"] for entry in EXPERIMENTS}
    for entry in OWN:
        for name in re.findall(r"founding: ([\w\-, ]+)\)", entry["hypothesis"]):
            assert {f"founding-{part}" for part in name.split(", ")} <= ids, entry["id"]


def test_a_figure_is_one_number():
    rows = [{"op": "a", "ms": {"median": 2.0}}, {"op": "a", "ms": {"median": 3.0}}]
    rows += [{"op": "b", "ms": {"median": 5}, "scale": 1}, {"op": "b"}]
    entry = {"what": "x", "file": "f", "row": {"op": "a"}, "value": "ms.median"}
    with pytest.raises(ValueError, match="x: 2 values ms.median"):
        registry.figure(entry, {"rows": rows})
    assert registry.figure({**entry, "fold": "sum"}, {"rows": rows}) == 5.0
    assert registry.figure({**entry, "row": {"op": "b", "scale": 1}}, {"rows": rows}) == 5
    with pytest.raises(ValueError, match="0 values"):
        registry.figure({**entry, "row": {"op": "b", "scale": None}}, {"rows": rows})


def test_listing(capsys):
    assert registry.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(EXPERIMENTS)
    assert registry.main(["--status", "temporarily_blocked", "--origin", "own"]) == 0
    assert "cublaslt-schedules-nvfp4" in capsys.readouterr().out
    assert registry.main(["--quoted"]) == 0
    assert "https://github.com/kijai/ComfyUI-KJNodes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        registry.main(["--status", "nonsense"])
    assert "'temporarily_blocked'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        registry.main(["perpetual-motion"])
    assert "there are exact-norm-order" in capsys.readouterr().err


@pytest.mark.parametrize("entry", EXPERIMENTS, ids=[entry["id"] for entry in EXPERIMENTS])
def test_every_experiment_prints(entry, capsys):
    assert registry.main([entry["id"]]) == 0
    out = capsys.readouterr().out
    assert entry["status"] in out and out.count("benchmarks/results/") >= len(entry["figures"])


def test_the_front_door_needs_no_comfyui_for_what_only_reads_results(tmp_path):
    def bench(*words):
        environ = {"PATH": "", "HOME": str(tmp_path), "USERPROFILE": str(tmp_path), "COMFYUI_DIR": str(tmp_path / "none")}
        line = [sys.executable, "-I", "-S", str(ROOT / "run.py"), "bench", *words]
        return subprocess.run(line, capture_output=True, text=True, env=environ, timeout=60)

    listed = bench("registry", "--origin", "own")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == len(OWN), listed.stderr
    file = str(ROOT / "benchmarks" / "results" / "attention-h200.json")
    for words in (("compare", file, file), ("attention", "--compare", file, file)):
        done = bench(*words)
        assert done.returncode == 0 and "ratio 1.0000" in done.stdout, done.stderr
    assert bench("step", "--plan").returncode != 0, "whatever measures asks for a ComfyUI first"
    wrong = bench("trajectroy")
    assert wrong.returncode == 2 and "unknown benchmark trajectroy; near it: trajectory" in wrong.stderr

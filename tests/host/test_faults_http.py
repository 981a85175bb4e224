"""Two servers that share one cache, one of them killed in mid-run and started again: every output as in the first process."""

import signal
import threading

import pytest
from h3_vortex.kernels import cache
from h3_vortex.tests.host import soak, test_accelerate_http

base = test_accelerate_http.base
JOB = soak.Job("pruned_int8_convrot", "none", 3, True)


@pytest.mark.slow
def test_two_servers_one_cache_and_a_kill_in_mid_run(start_server, base, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("shared-cache")
    monkeypatch.setenv("H3_VORTEX_CACHE", str(folder))
    soak.add_nodes(base)
    answers = {}

    def ask(name, server):
        answers[name] = soak.run_all(server, [JOB])[0]

    with start_server(*soak.FLAGS, base=base) as one:
        with start_server(*soak.FLAGS, base=base) as two:
            threads = [threading.Thread(target=ask, args=pair) for pair in (("one", one), ("two", two))]
            for thread in threads:  # both verify and write the same file at once
                thread.start()
            for thread in threads:
                thread.join()
            expected = soak.run_all(one, [JOB.stock])[0][0]

            def kill(kind, data):
                if kind == "progress" and data["value"] >= 2:  # updates are throttled: a quick step may bring none
                    two.process.send_signal(signal.SIGKILL)

            with pytest.raises(ConnectionError, match="closed the connection before the graph was finished"):
                two.queue(soak.Job(*JOB.result[:3], True, cancel_at=10**6).graph(), on_event=kill)
            assert two.process.wait(30) != 0
        ask("one again", one)
    files = [path for path in folder.glob("**/*") if path.is_file()]
    assert files and all(cache.read_bytes(path.parent.name, path.name) for path in files if path.suffix != ".part")
    with start_server(*soak.FLAGS, base=base) as restarted:
        ask("restarted", restarted)
        assert any("remembered" in verdict["note"] for verdict in restarted.get("/h3_vortex/status")[1]["verification"].values())
    for name, (digest, report) in answers.items():
        assert digest == expected, name
        assert report["stepped_aside"] is None and report["ops"], name

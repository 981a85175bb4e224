"""The pack in a real server: it loads, is listed in full, and a refused graph says why."""

from h3_vortex.frontdoor.server import PACK_FOLDER


def test_server_answers_and_pack_loads(server):
    status, stats = server.get("/system_stats")
    assert status == 200 and stats["system"]["comfyui_version"]
    (imported,) = [line for line in server.log.splitlines() if "seconds" in line and PACK_FOLDER in line]
    assert "IMPORT FAILED" not in imported, server.tail(60)

"""What nodes show on the canvas: sent to the page that queued the job, and to nobody else."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def page(comfy, monkeypatch):
    """A server with a page behind it; ``sent`` holds (text, node, page)."""
    from h3_vortex.nodes import host

    sent = []
    stand_in = SimpleNamespace(client_id="page", send_progress_text=lambda *message: sent.append(message), sent=sent)
    monkeypatch.setattr(host, "server", lambda: stand_in)
    return stand_in


def test_a_node_shows_its_text_and_keeps_it_in_the_history(page):
    from h3_vortex.nodes import host

    kept = host.shown(SimpleNamespace(hidden=SimpleNamespace(unique_id="7")), "two\nlines")
    assert page.sent == [("two\nlines", "7", "page")] and kept.as_dict() == {"text": ("two\nlines",)}


@pytest.mark.parametrize("client, hidden", [(None, SimpleNamespace(unique_id="7")), ("page", None)])
def test_without_a_page_or_an_id_nothing_is_sent(page, client, hidden):
    from h3_vortex.nodes import host

    page.client_id = client
    assert host.shown(SimpleNamespace(hidden=hidden), "text").as_dict() == {"text": ("text",)}
    assert page.sent == []


def test_accelerate_shows_its_report_after_every_run_also_an_interrupted_one(page):
    from h3_vortex.kernels.patch.report import Session
    from h3_vortex.nodes import accelerate

    session = Session("exact", "stock (exact)")
    session.step_aside("H3 Vortex: no kernel for cpu")
    run = accelerate._show_after(session, "3")
    assert run(lambda latent: latent + 1, 4) == 5

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert page.sent == [("ran as stock: no kernel for cpu", "3", "page")] * 2


def test_one_accelerate_node_behind_another_shows_one_report(page, comfy):
    from comfy.patcher_extension import WrappersMP
    from h3_vortex.nodes.accelerate import SHOW_KEY, H3VortexAccelerate

    model = comfy.sd.load_diffusion_model(str(comfy.models / "diffusion_models" / "minimax_h3_tiny_pruned_bf16.safetensors"))
    for _ in range(2):
        model = H3VortexAccelerate.execute(model, "exact", "stock (exact)").result[0]
    assert len(model.wrappers[WrappersMP.OUTER_SAMPLE][SHOW_KEY]) == 1

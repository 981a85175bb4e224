"""ComfyUI's ``PackedLayout`` against the layout that diffusers' pipeline builds: the same rows in the same places."""

import pytest
import torch
from h3_vortex.h3 import grid
from h3_vortex.tests.unit import h3_jobs

pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")


def packed(kind):
    """ComfyUI's layout of the same job."""
    from comfy.ldm.minimax.model import PackedLayout

    t, h, w, sound = h3_jobs.TARGET
    keyframes, references = None, None
    if kind in h3_jobs.KEYFRAMES:
        last = grid.frames_for_latent(t) - 1
        keyframes = [{"latent": torch.empty(1, 24, 1, h, w), "resolved_frame_index": 0 if anchor == "first" else last}
                     for anchor in h3_jobs.KEYFRAMES[kind]]
    else:
        references = []
        for name, shape, rows in h3_jobs.REFERENCES[kind]:
            entry = {"kind": name, "ref_audio_t": rows}
            if shape:
                entry |= {"latent_t": shape[0], "latent_h": shape[1], "latent_w": shape[2]}
            references.append(entry)
    return PackedLayout(len(h3_jobs.text_tags(kind)), t, h, w, sound, keyframes=keyframes, refs=references)


@pytest.mark.parametrize("kind", h3_jobs.KINDS)
def test_layouts_agree(comfy, kind):
    theirs = packed(kind)
    positions, tags, video, sound, text, video_conditions, sound_conditions = h3_jobs.layout(kind)
    assert theirs.seq_len == len(positions)
    assert torch.equal(theirs.img_pos, video) and torch.equal(theirs.audio_pos, sound)
    assert int((~theirs.img_update).sum()) == video_conditions and int((~theirs.audio_update).sum()) == sound_conditions
    # both rotate by fp32 angles; the fp64 coordinates are sums in different orders
    assert torch.equal(theirs.position_ids.float(), positions.float())

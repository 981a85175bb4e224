"""Files of any content where the pack reads files: its cache, checkpoints' headers, saved latents. Absent or refused by name."""

import json
import struct

import pytest
import torch
from h3_vortex.h3 import checkpoint, latent_file
from h3_vortex.kernels import cache, gemm_schedule
from h3_vortex.kernels.attention import measure, registry
from h3_vortex.kernels.patch import verification
from h3_vortex.tests.fuzz import budget
from hypothesis import given
from hypothesis import strategies as st

SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)


def near(**fields):
    """Objects that have most of these fields, each of the right kind or of any other."""
    return st.fixed_dictionaries({}, optional={key: st.one_of(kind, VALUES) for key, kind in fields.items()})


NUMBER = st.floats(allow_nan=False) | st.integers(-5, 100)
VERDICT = near(equal=st.booleans(), note=st.text(max_size=9), ms=st.lists(NUMBER, min_size=2, max_size=2) | st.none())
CONFIG = near(
    **{
        name: st.integers(-(2**40), 2**40)
        for name in ("id", "tile", "split_k", "reduction", "swizzle", "custom", "stages", "inner_shape", "cluster")
    }
)
SCHEDULE = near(config=CONFIG | st.none(), reason=st.text(max_size=9), stock_ms=NUMBER | st.none(), best_ms=NUMBER | st.none())
ENTRY = near(slice_ms=NUMBER, ms=NUMBER, error=NUMBER, equal_to_stock=st.booleans(), refused=st.text(max_size=6))
NAMES = ["stock", *(backend.name for backend in registry.automatic())]
RECORD = near(
    rows=st.integers(0, 9),
    heads=st.integers(0, 9),
    head_dim=st.integers(0, 9),
    slice_heads=st.integers(0, 9),
    seconds=NUMBER,
    candidates=st.dictionaries(st.sampled_from([*NAMES, "a backend of another version"]), ENTRY, max_size=4),
)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("H3_VORTEX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def place(kind, data):
    path = cache.cache_dir() / kind / "file"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@budget(100)
@given(st.binary(max_size=200), st.binary(max_size=80), st.integers(0, 300), st.integers(0, 255))
def test_cache_gives_what_was_written_or_nothing(body, junk, at, flip):
    place("bytes", junk)
    assert cache.read_bytes("bytes", "file") is None or len(junk) > 32
    assert cache.write_bytes("bytes", "file", body) and cache.read_bytes("bytes", "file") == (body or None)
    data = bytearray((cache.cache_dir() / "bytes" / "file").read_bytes())
    damaged = data[:at] if flip == 0 else data[: at % len(data)] + bytes([data[at % len(data)] ^ flip]) + data[at % len(data) + 1 :]
    place("bytes", bytes(damaged))
    assert cache.read_bytes("bytes", "file") == (body if damaged == data and body else None)
    assert cache.read_json("bytes", "file", 1) is None


@budget(100)
@given(st.dictionaries(st.sampled_from(["gate cpu", "x", ""]), VERDICT | VALUES, max_size=3))
def test_verdicts(data):
    cache.write_json(verification.KIND, "file", verification.VERSION, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_verdicts", {})
        patch.setattr(verification, "_loaded", set())
        verdict = verification.known("gate cpu", "file")
        summary = json.dumps(verification.summary())
        assert verification.timings() is not None and "gate cpu" in summary or verdict is None
    if verdict is not None:
        assert data["gate cpu"]["equal"] is verdict.equal and verdict.note == data["gate cpu"]["note"] + " (remembered)"


class NoSuchSchedule:
    """cuBLASLt that takes integers only and builds nothing."""

    def __init__(self, problem, device):
        pass

    def build(self, config):
        assert all(type(value) is int for value in vars(config).values())
        raise gemm_schedule.CublasLtError("check", 15)


@budget(100)
@given(SCHEDULE)
def test_schedules(data):
    cache.write_json("gemm", "file", gemm_schedule.CACHE_VERSION, data)
    problem = gemm_schedule.Problem("bf16", 4, 8, 16)
    operands = gemm_schedule.Operands(torch.zeros(4, 16), torch.zeros(8, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_schedule, "Matmul", NoSuchSchedule)
        outcome = gemm_schedule.Schedules._from_cache("file", "fc2", problem, [operands], lambda d: d.x @ d.w.T)
    assert outcome is None or outcome.config is None
    if outcome is not None:
        json.dumps(outcome.as_dict())


@budget(150)
@given(RECORD)
def test_attention_measurements(data):
    cache.write_json(measure.KIND, "file", measure.VERSION, data)
    record = measure.remembered("file", registry.automatic())
    if record is not None:
        order = measure.ranking(record)
        assert set(order) <= set(NAMES) and all(registry.backend(name) for name in order if name != "stock")
        assert len(measure.table(record)) >= len(order)


TENSOR = near(
    dtype=st.sampled_from(["F32", "BF16", "U8"]),
    shape=st.lists(st.integers(0, 9), max_size=3),
    data_offsets=st.lists(st.integers(0, 400), min_size=2, max_size=2),
)
KEYS = st.sampled_from(
    [
        "video_patch_proj.weight",
        "audio_patch_proj.weight",
        "blocks.0.attn.qkv_proj.weight",
        "blocks.0.attn.qkv_proj.comfy_quant",
        "adaln_t_table",
        "a.lora_A.weight",
        "__metadata__",
        "pre_block.attn.zero_k_bias",
    ]
)
QUANT = st.sampled_from(
    ['{"layers": {"blocks.0.attn.qkv_proj": {"format": "nvfp4"}}}', "[]", "{", '{"layers": 3}', '{"layers": {"x": 1}}', ""]
)
HEADER = st.dictionaries(KEYS, TENSOR | VALUES | st.fixed_dictionaries({"_quantization_metadata": QUANT}), max_size=5)


@budget(120)
@given(st.one_of(HEADER.map(json.dumps), VALUES.map(json.dumps), st.text(max_size=20)), st.binary(max_size=60), st.integers(-40, 40))
def test_checkpoint_headers(tmp_path_factory, header, data, off):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw = header.encode()
    path.write_bytes(struct.pack("<Q", max(0, len(raw) + (off if off % 5 == 0 else 0))) + raw + data)
    look(path)


@budget(60)
@given(st.binary(max_size=80) | st.just(b"PK\x05\x06" + b"\0" * 18))
def test_pytorch_files(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.pt"
    path.write_bytes(data)
    look(path)


def look(path):
    try:
        found = checkpoint.read_header(path)
        checkpoint.check_slot(found, checkpoint.DIFFUSION_MODEL)
        assert checkpoint.describe(found)
    except checkpoint.CheckpointError as error:
        assert path.name in str(error)


@budget(100)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_saved_latents(tmp_path_factory, at, flip, cut):
    folder = tmp_path_factory.getbasetemp()
    video, audio = torch.arange(384.0).view(1, 24, 2, 4, 2), torch.arange(128.0).view(1, 32, 2, 2)
    latent_file.save(folder / "whole.safetensors", video, audio)
    data = bytearray((folder / "whole.safetensors").read_bytes())
    header = 8 + struct.unpack("<Q", data[:8])[0]
    if cut:
        data = data[: at % len(data)]
    else:
        data[at % header] ^= flip  # beyond the header a changed bit is another number, which no format notices
    path = folder / "damaged.safetensors"
    path.write_bytes(bytes(data))
    try:
        found = latent_file.load(path)
    except ValueError as error:
        assert path.name in str(error)
        return
    assert flip == 0 or all(isinstance(tensor, torch.Tensor) for tensor in found)

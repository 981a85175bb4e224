"""The attention benchmark from end to end at tiny size: every backend has a row, stock's bytes are told, the file is valid."""

import json

from h3_vortex.benchmarks import attention, harness
from h3_vortex.kernels.attention import registry


def test_every_backend_has_a_row(tmp_path):
    out = tmp_path / "attention.json"
    assert attention.main(["--model", "tiny", "--job", "tiny", "--device", "cpu", "--rounds", "2", "--fastest", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    harness.validate(result)
    assert result["kind"] == "attention" and result["speed_valid"] is False
    rows = {row["backend"]: row for row in result["rows"]}
    assert set(rows) == {"stock", *registry.BACKENDS} and len(rows) == len(result["rows"])
    assert "CUDA" in rows["sdpa_cudnn"]["skipped"] and "ms" not in rows["sdpa_cudnn"]
    for name in ("stock", "sdpa_flash"):
        row = rows[name]
        assert row["ms"]["n"] == 2 and row["equal_to_stock"] and 0 < row["relative_error"] < 2**-8 and row["copies"] == []
        assert (row["rows"], row["heads"], row["head_dim"]) == (31, 2, 128)
    assert rows["stock"]["speedup"] == 1 and result["plan"]["backend"] == "stock"

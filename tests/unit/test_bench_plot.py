"""The plots: what is drawn is what the result files hold, the images are small, and a missing file or matplotlib is said in one line."""

import json
import sys

import pytest
from h3_vortex.benchmarks import harness, plot, shapes

ROWS = shapes.JOBS["canonical"].rows


def committed(kind):
    return plot.only(harness.RESULTS, kind)


def test_a_bar_is_the_sum_of_its_block():
    results = plot.load(harness.RESULTS.glob("block-*.json"))
    bars = plot.block_bars(results)
    sums = {row["sum_ms"] for result in results for row in result["rows"] if "sum_ms" in row}
    assert len(bars) >= 2
    for label, stock, ours in bars:
        assert "\n" in label and "products" in stock and not any(group.endswith("GEMM") for group in stock)
        for side in (stock, ours):
            assert min(abs(sum(side.values()) - total) for total in sums) < 1e-3


def test_a_configuration_with_one_side_is_left_out():
    row = {"weights": "int8", "attention": "cudnn", "groups_ms": {"attention": 2.0, "qkv GEMM": 1.0, "fc1 GEMM": 3.0, "rope": 0.5}}
    skipped = {"weights": "int8", "attention": "sage", "candidate": None, "skipped": "needs a CUDA device"}
    assert plot.block_bars([{"rows": [{**row, "candidate": "stock"}, skipped]}]) == []
    both = [{**row, "candidate": "stock"}, {**row, "candidate": "exact"}, {**row, "candidate": "fastest"}, skipped]
    ((label, stock, ours),) = plot.block_bars([{"rows": both}])
    assert label == "INT8-ConvRot\ncudnn attention" and stock == ours == {"products": 4.0, "attention": 2.0, "rope": 0.5}


def test_shares_of_the_roof():
    kernels = committed("kernels")
    shares = plot.roof_shares(kernels, committed("attention"), committed("gemm"))
    ops = {name: (stock, ours) for name, roof, stock, ours in shares if roof == "copy"}
    speedups = {row["op"]: row["backends"]["cuda"]["speedup"] for row in kernels["rows"]
                if row["rows"] == ROWS and row.get("table_dtype") != "bfloat16" and "tensor_scale" not in row}  # fmt: skip
    assert set(ops) == set(speedups) and len(ops) > 10
    for name, (stock, ours) in ops.items():
        assert ours / stock == pytest.approx(speedups[name])
    products = [(name, share) for name, roof, share, ours in shares if roof == "matmul"]
    assert {name for name, _ in products} >= {"qkv (BF16)", "fc2 (BF16)", "attention: stock"}
    assert all(0 < share < 1.1 for _, share in products)
    without = plot.roof_shares({**kernels, "rows": [*kernels["rows"], {"op": "gate", "rows": ROWS, "skipped": "stock cannot run here"}]})
    assert without == [entry for entry in shares if entry[1] == "copy"]


def test_both_images_are_drawn_and_small(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib (requirements/test.txt)")
    assert plot.main(["--out", str(tmp_path)]) == 0
    for name in ("block.png", "roofline.png"):
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG") and 10_000 < len(data) < 150_000


def test_committed_images_are_small():
    for name in ("block.png", "roofline.png"):
        assert (plot.IMAGES / name).stat().st_size < 150_000


def test_a_harness_check_is_never_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib (requirements/test.txt)")
    (tmp_path / "kernels.json").write_text(json.dumps({"kind": "kernels", "speed_valid": False, "rows": [], "created": "2026"}))
    with pytest.raises(SystemExit, match="no kernels result with real speeds"):
        plot.main(["--results", str(tmp_path), "--out", str(tmp_path)])


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        plot.main(["--out", str(tmp_path)])

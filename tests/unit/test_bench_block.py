"""The block benchmark on made-up traces: what a block's worth of work is, and into which group each kernel goes."""

import pytest
from h3_vortex.benchmarks import block, shapes

MODEL = shapes.MODELS["h3"]


def operator(name, *dims, start=0.0, end=1.0):
    return block.Operator(name, start, end, 1, [list(shape) for shape in dims])


S = 37_810


@pytest.mark.parametrize(
    ("chain", "kernel", "group"),
    [
        ([operator("aten::linear", (S, 5376), (21504, 5376), ())], "nvjet_tst_256x128", "qkv GEMM"),
        ([operator("aten::linear", (S, 14336), (5376, 14336)), operator("aten::mm", (S, 14336), (14336, 5376))], "gemm", "fc2 GEMM"),
        ([operator("aten::linear", (S, 5376), (28672, 5376))], "convrot_quant_rowwise_kernel", "quantise"),
        ([operator("aten::linear", (S, 5376), (28672, 5376))], "cutlass::Kernel<DefaultGemmWithVisitor, dequant>", "fc1 GEMM"),
        ([], "cutlass::Kernel2<gemm>", block.BARE),
        ([], "swiglu", "activation"),
        ([], "gate_norm_modulate_int8", "gate + norm + modulation + quantise"),
        ([], "qk_int_sv_i8_attn_kernel<128u>", "attention"),
        ([], "quant_qk_fused<__nv_bfloat16>", "attention: quantise"),
        ([], "swiglu_convrot_quant_kernel", "activation + quantise"),
        ([operator("h3_vortex::int8_linear", (S, 14336), (S, 1), (5376, 14336))], "cutlass::gemm", "fc2 GEMM"),
        ([operator("aten::mul_", (S - 514, 5376), (5376,))], "elementwise_kernel", "modulation"),
        ([operator("aten::add_", (100, 5376), (5376,), ())], "elementwise_kernel", "modulation"),
        ([operator("aten::addcmul_", (S, 5376), (S, 5376), (5376,), ())], "elementwise_kernel", "gate"),
        ([operator("aten::add", (5376,), (), ())], "elementwise_kernel", "other"),
        ([operator("aten::rms_norm", (S, 5376), (), (5376,))], "vectorized_layer_norm_kernel", "norm"),
        ([operator("aten::silu", (S, 14336))], "elementwise_kernel", "activation"),
        ([operator("aten::mul_", (S, 14336), (S, 14336))], "elementwise_kernel", "activation"),
        ([operator("comfy_kitchen::rms_rope_split_half_", (1, S, 56, 128))], "rms_rope_kernel", "rope"),
        ([operator("aten::scaled_dot_product_attention", (1, 56, S, 128))], "flash_fwd_kernel", "attention"),
        ([], "_attn_fwd", "attention"),
        ([], "quant_per_block_int8_kernel", "attention: quantise"),
        ([operator("aten::clone", (S, 56, 128), ())], "elementwise_kernel", "copies"),
        ([operator("aten::linear", (2, 8), (96768, 8), (96768,))], "gemv", "adaln"),
        ([operator("h3_vortex::gate_norm_modulate", (S, 5376))], "norm_modulate_kernel", "gate + norm + modulation"),
        ([operator("h3_vortex::qk_norm_rope", (1, S, 56, 128))], "qk_norm_rope", "rope"),
    ],
)  # fmt: skip
def test_kernels_are_sorted_by_what_launched_them(chain, kernel, group):
    assert block.classify(chain, kernel, MODEL) == group


def test_a_cast_of_the_weight_is_no_product():
    assert block.gemm_of(operator("aten::to", (21504, 5376), ()), MODEL) is None
    assert block.gemm_of(operator("aten::copy_", (21504, 5376), (21504, 5376)), MODEL) is None


def trace(blocks):
    """A CUDA trace of ``blocks`` blocks: a QKV product of 2 ms, RoPE of 0.5 ms, a gate of 1 ms, launched inside their operators."""
    events, correlation = [], 0
    for index in range(blocks):
        for at, name, dims, kernel, duration in (
            (0, "aten::linear", [[S, 5376], [21504, 5376], []], "nvjet", 2000.0),
            (1, "aten::mm", [[S, 5376], [5376, 21504]], None, 0),
            (30, "comfy_kitchen::rms_rope_split_half_", [[1, S, 56, 128]], "rope_kernel", 500.0),
            (50, "aten::addcmul_", [[S, 5376], [S, 5376], [5376], []], "elementwise_kernel", 1000.0),
        ):
            start = 100.0 * index + at
            length = 20 if name == "aten::linear" else 10
            events.append({"cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": 7,
                           "args": {"Input Dims": dims}})  # fmt: skip
            if kernel:
                correlation += 1
                events.append({"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": start + 2, "dur": 1, "tid": 7,
                               "args": {"correlation": correlation}})  # fmt: skip
                events.append({"cat": "kernel", "name": kernel, "ts": 10_000 + start, "dur": duration, "tid": 0,
                               "args": {"correlation": correlation}})  # fmt: skip
    return events


def test_a_block_is_what_lies_between_two_rope_kernels():
    windows = block.blocks_of(*block.read_trace(trace(4), "cuda"), MODEL)
    assert len(windows) == 3
    groups, kernels = block.tabulate(windows)
    assert groups == {"qkv GEMM": 2.0, "gate": 1.0, "rope": 0.5}
    assert kernels[0] == {"group": "qkv GEMM", "name": "nvjet", "ms": 2.0, "launches": 1}


def test_products_without_an_operator_are_named_by_their_order():
    bare = [(block.BARE, "gemm")]
    groups = [group for group, _ in block.named_products([("rope", "r"), *bare, ("gate", "g"), *bare, *bare, *bare])]
    assert groups == ["rope", "out_proj GEMM", "gate", "fc1 GEMM", "fc2 GEMM", "qkv GEMM"]
    assert block.named_products(bare) == [("fc2 GEMM", "gemm")]
    assert block.named_products(bare * 3) == [(f"{block.BARE} GEMM", "gemm")] * 3


def test_a_trace_without_launches_is_refused():
    events = [event for event in trace(3) if event["cat"] != "cuda_driver"]
    with pytest.raises(RuntimeError, match="no launch"):
        block.read_trace(events, "cuda")


def test_one_block_is_not_enough():
    with pytest.raises(RuntimeError, match="at least two blocks"):
        block.tabulate(block.blocks_of(*block.read_trace(trace(1), "cuda"), MODEL))
    with pytest.raises(SystemExit):
        block.arguments(["--blocks", "1"])

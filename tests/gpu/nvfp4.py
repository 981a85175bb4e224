"""Comparison of the NVFP4 ops with stock's ``QuantizedTensor.from_float`` on the GPU."""

import contextlib

import torch
from h3_vortex.kernels.dispatch import use_backend
from h3_vortex.tests.gpu import data

WIDTH = {"nvfp4_quantize": 7168}
FAST = [  # every fast path there is
    ("nvfp4_quantize", "cuda"), ("nvfp4_quantize", "triton"), ("modulate_nvfp4", "cuda"), ("modulate_nvfp4", "triton"),
    ("norm_modulate_nvfp4", "cuda"), ("gate_norm_modulate_nvfp4", "cuda"), ("swiglu_nvfp4", "cuda"), ("swiglu_nvfp4", "triton"),
]


@contextlib.contextmanager
def poisoned():
    """What ``torch.empty`` hands out is full of 0xA5: a byte that a kernel leaves unwritten shows."""
    empty = torch.empty

    def filled(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.is_cuda and tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
        return tensor

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty


def differing(got, expected):
    """Elements that differ in their bytes; a tensor scale of NaN equals any NaN (it poisons the product whatever its bits)."""
    scales = [torch.nan_to_num(triple[1], nan=-1.0) for triple in (got, expected)]
    return data.differing([got[0], scales[0], *got[2:]], [expected[0], scales[1], *expected[2:]])


def assert_stock_bytes(case, backend):
    """Runs ``backend`` and stock on fresh copies of the same inputs: no byte of codes, scales, padding (or ``x``) may differ."""
    expected = case.stock(*case.inputs())
    arguments = case.inputs()
    with use_backend(backend), poisoned():
        got = case.ours(*arguments)
    wrong = differing(got, expected)
    assert wrong == 0, f"{wrong} of {sum(t.numel() for t in expected)} elements differ from stock"

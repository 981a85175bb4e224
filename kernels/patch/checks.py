"""What stock ComfyUI runs in place of each op, and the comparison of the two on small synthetic data with the call's own weights."""

from types import SimpleNamespace

import torch

from .. import segments
from . import eligibility, ops, verification

ROW_ARGUMENTS = frozenset({"x", "h", "other", "gate_up"})
IN_PLACE = frozenset({"modulate", "gate", "gate_norm_modulate", "gate_norm_modulate_nvfp4", "gate_norm_modulate_int8"})
INT8_OUT = 256  # output width of the random INT8 weight through which an INT8 pair is judged


def sample(name: str, args, rows: int, seed: int = 0) -> SimpleNamespace:
    """The call's arguments with its token tensors replaced by ``rows`` rows of synthetic data; weights and tables stay."""
    given = dict(zip(ops.operator(name).signature, args, strict=True))
    poison = not name.endswith(("nvfp4", "int8", "nvfp4_quantize"))
    table = next((given[t] for t in ("scale", "gate") if t in given), None)
    built = SimpleNamespace(**given)
    for offset, (key, value) in enumerate(given.items()):
        if key in ROW_ARGUMENTS:
            setattr(built, key, verification.activations(rows, value.shape[1], value.dtype, value.device, seed + offset, poison))
    if table is not None:
        built.segments = verification.segments(rows, table.shape[0], seed)
        built.rows = segments.row_map(built.segments, rows, table.device)
    if "freqs" in given:
        _sample_heads(built, given, rows, seed, poison)
    return built


def _sample_heads(built, given, rows, seed, poison):
    q, freqs = given["q"], given["freqs"]
    heads, width = q.shape[1:]
    buffer = verification.activations(rows, 3 * heads * width, q.dtype, q.device, seed, poison)
    built.buffer = buffer
    built.q, built.k, _ = (t.view(rows, heads, width) for t in buffer.split(heads * width, dim=-1))
    angles = torch.rand(rows, freqs.shape[3], generator=torch.Generator("cpu").manual_seed(seed)) * 100
    cos, sin = torch.cos(angles), torch.sin(angles)
    built.freqs = torch.stack([cos, -sin, sin, cos], dim=-1).reshape(1, rows, 1, freqs.shape[3], 2, 2).to(freqs)


def _arguments(name, a):
    return [getattr(a, key) for key in ops.operator(name).signature]


def _copies(name, a) -> SimpleNamespace:
    """A second set of the tensors that the op writes to."""
    own = SimpleNamespace(**vars(a))
    name = ops.stem(name)
    if name == "qk_norm_rope":
        own.buffer = a.buffer.clone()
        heads, width = a.q.shape[1:]
        own.q, own.k, _ = (t.view(a.q.shape[0], heads, width) for t in own.buffer.split(heads * width, dim=-1))
    elif name in IN_PLACE:
        key = "h" if name == "modulate" else "x"
        setattr(own, key, getattr(a, key).clone())
    return own


def _ours(name, a, pair_linear) -> list:
    out = ops.run(name, *_arguments(name, a))
    name = ops.stem(name)
    if name == "qk_norm_rope":
        return [a.buffer]
    if name.endswith("int8"):
        out = [pair_linear(out)]
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    return results + ([a.x] if name in IN_PLACE and name != "modulate" else [])


def _stock(core, name, a, plain_linear) -> list:
    """The stock chain with the same arguments; ``plain_linear`` is the INT8 GEMM on plain activations."""
    if name == "qk_norm_rope":
        core.kitchen.rms_rope_split_half_(
            a.q[None], a.k[None], a.freqs, a.q_weight, a.k_weight, epsilon=a.eps, rot_dim=a.freqs.shape[-3] * 2)
        return [a.buffer]
    gated = []
    if name == "gate" or name.startswith("gate_"):
        gated = [core.model._mod_gate(a.x, a.gate, a.other, a.segments)]
        if name == "gate":
            return gated * 2  # the op returns x, which is also what it wrote to
    if "norm_modulate" in name:
        h = torch.nn.functional.rms_norm(a.x, a.weight.shape, a.weight, a.eps)
        h = core.model._mod_scale_shift(h, a.shift, a.scale, a.segments)
    elif name.startswith("modulate"):
        h = core.model._mod_scale_shift(a.h.clone(), a.shift, a.scale, a.segments)
    elif name == "swiglu_int8":
        return [plain_linear(a.gate_up, "swiglu")]
    elif name.startswith("swiglu"):
        h = core.ops.INPUT_ACT_EAGER["swiglu"](a.gate_up)
    else:
        h = a.x
    if name.endswith("int8"):
        return [plain_linear(h, None), *gated]
    if "nvfp4" in name:
        return [*stock_nvfp4(core, h, a.tensor_scale), *gated]
    return [h, *gated]


def stock_nvfp4(core, h, tensor_scale) -> list:
    """``(qdata, tensor scale, block scale)`` as ``Linear.forward`` makes them."""
    q = core.QuantizedTensor.from_float(h, eligibility.NVFP4, scale=tensor_scale)
    return [q._qdata, q._params.scale, q._params.block_scale]


def _int8_linears(core, name, a):
    """(GEMM on an INT8 pair, GEMM on plain activations) with one random ConvRot weight ``[INT8_OUT, K]``; (None, None) for other ops."""
    if not name.endswith("int8"):
        return None, None
    x = a.gate_up if name == "swiglu_int8" else a.x
    width, dtype, device = x.shape[1] // (2 if name == "swiglu_int8" else 1), x.dtype, x.device
    generator = torch.Generator("cpu").manual_seed(width)
    dense = (torch.randn(INT8_OUT, width, generator=generator) * width**-0.5).to(device)
    layout = core.quant.TensorWiseINT8Layout
    qdata, params = layout.quantize(dense, per_channel=True, convrot=True, convrot_groupsize=eligibility.CONVROT_GROUP)

    def plain(x, act):
        keywords = {"input_act": act} if act else {}
        return core.kitchen.int8_linear(
            x, qdata, params.scale, None, dtype, convrot=True, convrot_groupsize=eligibility.CONVROT_GROUP, **keywords)

    return lambda pair: ops.int8_gemm(pair, qdata, params.scale, dtype), plain


def against(stock, name: str, args, rows: int = verification.SAMPLE_ROWS) -> tuple[list, list]:
    """Results of our op and of ``stock(name, sample)`` on the same sample, for a host whose layers take plain activations.

    ``stock`` may write into the sample's tensors and returns, in order: what the op returns, then what the op wrote to besides.
    """
    a = sample(name, args, rows)
    theirs = stock(name, _copies(name, a))
    return _ours(name, a, None), theirs


def time_against(stock, name: str, args, rows: int = verification.TIMED_ROWS, repeats: int = 5) -> tuple[float, float]:
    """Milliseconds (stock, ours) of one call on ``rows`` rows, as :func:`time` gives them."""
    a = sample(name, args, rows)
    theirs, mine = _copies(name, a), _copies(name, a)
    return _median(lambda: stock(name, theirs), repeats), _median(lambda: _ours(name, mine, None), repeats)


def compare(core, name: str, args) -> tuple[list, list]:
    """Results of our op and of the stock chain on the same sample. Every tensor made here dies with the caller's references."""
    ours, stock = _compare(core, name, args, verification.SAMPLE_ROWS)
    if "nvfp4" in name:  # rows in sixteens take other code: nothing is padded
        more = _compare(core, name, args, verification.SAMPLE_ROWS // 16 * 16)
        ours, stock = ours + more[0], stock + more[1]
    return ours, stock


def _compare(core, name, args, rows):
    a = sample(name, args, rows)
    pair_linear, plain_linear = _int8_linears(core, name, a)
    stock = _stock(core, name, _copies(name, a), plain_linear)
    return _ours(name, a, pair_linear), stock


def time(core, name: str, args, rows: int = verification.TIMED_ROWS, repeats: int = 5) -> tuple[float, float]:
    """Milliseconds (stock, ours) of one call on ``rows`` rows: medians over CUDA events.

    INT8 ops are timed together with the small GEMM that judges them.
    """
    a = sample(name, args, rows)
    pair_linear, plain_linear = _int8_linears(core, name, a)
    theirs, mine = _copies(name, a), _copies(name, a)
    return _median(lambda: _stock(core, name, theirs, plain_linear), repeats), _median(lambda: _ours(name, mine, pair_linear), repeats)


def _median(call, repeats) -> float:
    times = []
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times[1:])[repeats // 2]  # the first call compiles and loads


def block(core, model, block, run_block, dtype, device) -> tuple[list, list]:
    """A whole block on a small packed sequence: ``run_block(args)`` against the block's own forward, with attention as the core has it.

    Catches what no signature shows: a core whose block does something else than the runner reproduces.
    """
    rows, generator = verification.SAMPLE_ROWS, torch.Generator("cpu").manual_seed(0)
    x = verification.activations(rows, block.norm1.weight.shape[0], dtype, device, 0, poison=False)
    t_dtype = torch.float32 if hasattr(model, "adaln_t_table") else dtype
    t_emb = torch.randn(2, block.adaln_proj.linear.in_features, generator=generator).to(device, t_dtype)
    angles = torch.rand(rows, 2 * 3 * model.rope.inv_freq.shape[0], generator=generator) * 100
    rope = core.model.rope_rotation_table(angles.to(device), dtype)
    runs = verification.segments(rows, 2 * 3, 0)
    for _ in range(2):  # the first attention call of a process may take another backend than every later one
        stock = block(x.clone(), t_emb, runs, rope, transformer_options={})
    args = {"img": x, "t_emb": t_emb, "mod_segments": runs, "rope_freqs": rope, "transformer_options": {}}
    return [run_block(args)["img"]], [stock]


def attention_v(core, attn, options, dtype, device, rows: int) -> tuple[list, list]:
    """Attention of q, k, v as views of one qkv buffer, with v as it is and with v copied, as stock does."""
    heads, width = attn.heads, attn.head_dim
    buffer = verification.activations(rows, 3 * heads * width, dtype, device, 0, poison=False)
    views = [t.view(rows, heads, width) for t in buffer.split(heads * width, dim=-1)]
    core.attend(attn, list(views), options)  # the first attention call of a process may take another backend than every later one
    ours = core.attend(attn, list(views), options)
    stock = core.attend(attn, [*views[:2], views[2].clone()], options)
    return [ours], [stock]

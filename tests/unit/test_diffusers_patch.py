"""The kernels in diffusers' real H3 blocks: the bytes of stock for every kind of conditioning, and a clean way in and out."""

import copy

import pytest
import torch
from h3_vortex.kernels import attention, gate
from h3_vortex.kernels.patch import verification
from h3_vortex.kernels.patch.ops import Features, operator
from h3_vortex.tests.unit import h3_jobs

pytest.importorskip("diffusers", "0.42", reason="needs diffusers >= 0.42 (requirements/diffusers.txt)")
from h3_vortex.h3 import embedded_tiny
from h3_vortex.kernels.patch import diffusers as host

EAGER = Features(allow_eager=True)
OPS = {"norm_modulate", "gate_norm_modulate_twice", "gate_twice", "qk_norm_rope_torch", "swiglu_value_gate"}


@pytest.fixture(autouse=True)
def own_verdicts(tmp_path, monkeypatch):
    monkeypatch.setenv("H3_VORTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(verification, "_verdicts", {})
    monkeypatch.setattr(verification, "_loaded", set())


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def any_model(request):
    return embedded_tiny.transformer(request.param)


@pytest.fixture
def model():
    return embedded_tiny.transformer()


@torch.no_grad()
def run(model, kind="both frames"):
    dtype = next(model.transformer_blocks.parameters()).dtype
    return model(**h3_jobs.arguments(kind, model, text_dtype=dtype))


def same(one, other):
    return verification.difference(list(one), list(other)) is None


def fused(handle):
    return {name for name, calls in handle.report()["ops"].items() if calls["fused"] and not calls["stock"]}


def places(model):
    """Everything that accelerating may touch, to be compared before and after."""
    found = [dict(model._forward_hooks), dict(model._forward_pre_hooks), {k: v for k, v in vars(model).items() if k == "forward"}]
    for block in model.transformer_blocks:
        references = getattr(getattr(block, "_diffusers_hook", None), "_fn_refs", [])
        found.append({k: v for k, v in vars(block).items() if k in ("forward", "_old_forward")})
        found.append([(r.forward, r.original_forward) for r in references])
    return found


@pytest.mark.parametrize("kind", h3_jobs.KINDS)
def test_patched_is_stock(any_model, kind):
    stock = run(any_model, kind)
    with host.accelerate(any_model, EAGER) as handle:
        assert same(run(any_model, kind), stock)
    report = handle.report()
    assert fused(handle) == OPS == set(report["ops"]), report["ops"]
    assert report["model_calls"] == 1 and report["stepped_aside"] is None and report["attention"]["class"] == "E0"
    assert all(verdict["equal"] for verdict in report["verification"].values())


def test_the_whole_output_depends_on_the_patch(model, monkeypatch):
    """With verification out of the way a wrong op shows in the output: the comparison above is not of stock with stock."""
    stock = run(model)
    monkeypatch.setattr(verification, "settle", lambda *_: verification.Verdict(True, "not looked at"))
    monkeypatch.setattr(gate.OPS["twice"].backends["eager"], "run", gate.reference)
    with host.accelerate(model, EAGER):
        assert not same(run(model), stock)


def test_an_op_with_other_bytes_is_switched_off(model, monkeypatch, caplog):
    stock = run(model)

    def wrong(gate_up):
        value, gated = gate_up.chunk(2, dim=-1)
        return (value.float() * torch.nn.functional.silu(gated.float())).to(gate_up.dtype)  # one rounding too few

    monkeypatch.setattr(operator("swiglu_value_gate").backends["eager"], "run", wrong)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    calls = handle.report()["ops"]["swiglu_value_gate"]
    assert not calls["fused"] and any("bytes not those of stock" in reason for reason in calls["stock"])
    assert "swiglu_value_gate" in caplog.text and "switched off" in caplog.text


@pytest.mark.parametrize("name", ["norm", "gate", "rope", "swiglu"])
def test_groups_can_be_switched_off(model, name):
    stock = run(model)
    with host.accelerate(model, Features(allow_eager=True, **{name: False})) as handle:
        assert same(run(model), stock)
    assert any("switched off" in calls["stock"] for calls in handle.report()["ops"].values())


def test_without_an_accelerator_stock_runs_and_says_so(model, caplog):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    stock = run(model)
    with host.accelerate(model) as handle:
        assert same(run(model), stock)
    assert "no accelerated kernel for cpu" in handle.report()["stepped_aside"]
    assert caplog.text.count("no accelerated kernel") == 1


# -- in and out ------------------------------------------------------------------------------------------------------------------


def test_undo_leaves_nothing(model):
    before = places(model)
    handle = host.accelerate(model, EAGER)
    assert places(model) != before
    run(model)
    handle.undo()
    handle.undo()
    assert places(model) == before


def test_other_instances_are_untouched(model):
    other = embedded_tiny.transformer(seed=1)
    before = places(other)
    with host.accelerate(model, EAGER):
        assert places(other) == before
        run(other)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_twice_in_any_order(model, order):
    stock, before = run(model), places(model)
    handles = [host.accelerate(model, EAGER), host.accelerate(model, EAGER)]
    assert same(run(model), stock)
    assert [handle.report()["model_calls"] for handle in handles] == [0, 1], "the newest decides, and only it"
    handles[order[0]].undo()
    assert same(run(model), stock)
    assert handles[order[1]].report()["model_calls"] == (2 if order[1] == 1 else 1)
    handles[order[1]].undo()
    assert places(model) == before


class Doubling:
    """Makes a diffusers hook that doubles what a block returns, so that its absence shows."""

    @staticmethod
    def add(model, name="doubling"):
        from diffusers.hooks import HookRegistry, ModelHook

        class Hook(ModelHook):
            def post_forward(self, module, output):
                return output * 2

        for block in model.transformer_blocks:
            HookRegistry.check_if_exists_or_initialize(block).register_hook(Hook(), name)

    @staticmethod
    def remove(model, name="doubling"):
        for block in model.transformer_blocks:
            block._diffusers_hook.remove_hook(name, recurse=False)


@pytest.mark.parametrize("hooked_first", [True, False])
@pytest.mark.parametrize("undone_first", [True, False])
def test_diffusers_hooks_keep_working(model, hooked_first, undone_first):
    plain = run(model)
    if hooked_first:
        Doubling.add(model)
        stock = run(model)
        handle = host.accelerate(model, EAGER)
    else:
        handle = host.accelerate(model, EAGER)
        Doubling.add(model)
        handle.undo()
        stock = run(model)
        Doubling.remove(model)
        handle = host.accelerate(model, EAGER)
        Doubling.add(model)
    assert not same(stock, plain) and same(run(model), stock) and fused(handle) == OPS
    if undone_first:
        handle.undo()
        assert same(run(model), stock)
        Doubling.remove(model)
    else:
        Doubling.remove(model)
        assert same(run(model), plain)
        handle.undo()
    assert same(run(model), plain)
    assert all(getattr(vars(b).get("forward"), "__func__", None) in (None, type(b).forward) for b in model.transformer_blocks)


def test_offload_hooks_of_accelerate(model):
    """accelerate's hooks on every leaf: each layer is on the meta device except while it works."""
    accelerate = pytest.importorskip("accelerate")
    stock = run(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert any(p.device.type == "meta" for p in model.parameters())
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    ops = handle.report()["ops"]
    assert ops["swiglu_value_gate"]["fused"] and ops["gate_twice"]["fused"]
    assert any("RMSNorm" in reason for reason in ops["norm_modulate"]["stock"]), ops
    assert same(run(model), stock)


def test_offload_hooks_of_diffusers(model, monkeypatch):
    """Group offloading, block by block; a CPU has no streams and no other memory, but the hooks are the real ones."""
    stock = run(model)
    model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    assert fused(handle) == OPS
    assert same(run(model), stock)


def test_hooks_may_keep_what_they_saw(model):
    """The residual stream is updated in place: what a hook was given must stay as it was."""
    def record(into):
        hooks = []
        for module in (part for block in model.transformer_blocks for part in (block, block.norm1, block.norm2)):
            hooks.append(module.register_forward_hook(lambda m, args, out: into.extend([(args[0], args[0].clone()), (out, out.clone())])))
        run(model)
        for hook in hooks:
            hook.remove()

    stock, ours = [], []
    record(stock)
    with host.accelerate(model, EAGER):
        run(model)  # verifies
        record(ours)
    assert len(stock) == len(ours) and all(torch.equal(kept, then) for kept, then in ours)
    assert same([then for _, then in ours], [then for _, then in stock])


def test_a_foreign_forward_stays(model):
    block = model.transformer_blocks[0]
    stock_forward = block.forward
    block.forward = lambda *args, **kwargs: stock_forward(*args, **kwargs) * 2
    stock = run(model)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    calls = handle.report()["ops"]
    assert calls["block"]["stock"] == {"somebody else replaced its forward": 1} and calls["gate_twice"]["fused"] == {"eager": 1}


def test_a_copied_transformer_is_stock(model):
    stock = run(model)
    with host.accelerate(model, EAGER) as handle:
        twin = copy.deepcopy(model)
        assert same(run(twin), stock) and handle.report()["model_calls"] == 0
        twin.transformer_blocks[0].norm1.weight.zero_()
        assert not same(run(twin), stock) and same(run(model), stock)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_transformers_stay_correct(model, compiled_first):
    stock = run(model)
    if compiled_first:
        compiled = torch.compile(model, backend="eager")
        handle = host.accelerate(compiled, EAGER)
        assert "torch.compile" in handle.report()["stepped_aside"]
    else:
        handle = host.accelerate(model, EAGER)
        compiled = torch.compile(model, backend="eager")
    assert same(run(compiled), stock)
    assert not handle.report()["ops"]
    handle.undo()
    assert same(run(compiled), stock) and same(run(model), stock)


def test_compiled_blocks_step_aside(model):
    for block in model.transformer_blocks:
        block.compile(backend="eager")
    assert "Module.compile" in host.accelerate(model, EAGER).report()["stepped_aside"]


# -- other states of the model -------------------------------------------------------------------------------------------------------


def test_lora_on_every_layer(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    layers = ["to_q", "to_k", "to_v", "to_out.0", "proj", "net.2", "linear"]
    model.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, target_modules=layers))
    stock = run(model)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    assert fused(handle) == OPS


def test_fused_projections(model):
    model.fuse_qkv_projections()
    assert model.transformer_blocks[0].attn.fused_projections
    stock = run(model)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    assert fused(handle) == OPS


def test_gradients_run_stock(model):
    model.requires_grad_(True)
    arguments = h3_jobs.arguments("text", model)
    with host.accelerate(model, EAGER) as handle:
        model(**arguments)[0].float().sum().backward()
    assert all(p.grad is not None for p in model.transformer_blocks[0].parameters())
    assert any("gradients" in reason for reason in handle.report()["ops"]["block"]["stock"])


def test_a_batch_runs_stock(model):
    arguments = h3_jobs.arguments("text", model)
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        arguments[name] = arguments[name].repeat(2, 1, 1)
    with torch.no_grad():
        stock = model(**arguments)
        with host.accelerate(model, EAGER) as handle:
            assert same(model(**arguments), stock)
    assert any("one contiguous sequence" in reason for reason in handle.report()["ops"]["block"]["stock"])


def test_another_attention_processor_is_called(model):
    class Processor(type(model.transformer_blocks[0].attn.processor)):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs) * 0.5

    model.transformer_blocks[1].attn.set_processor(Processor())
    stock = run(model)
    with host.accelerate(model, EAGER) as handle:
        assert same(run(model), stock)
    assert handle.report()["ops"]["attention"]["stock"] == {"its processor is a Processor": 1}
    with host.accelerate(model, EAGER, attention="sdpa_flash"), pytest.raises(
        attention.AttentionUnavailable, match="sdpa_flash was asked for, but: its processor is a Processor"
    ):
        run(model)
    assert same(run(model), stock)


def test_modulation_of_another_dtype_runs_stock():
    model = embedded_tiny.transformer(torch.float32)
    for block in model.transformer_blocks:
        block.adaln_proj.bfloat16()
    arguments = h3_jobs.arguments("text", model, text_dtype=torch.float32)
    with torch.no_grad():
        stock = model(**arguments)
        with host.accelerate(model, EAGER) as handle:
            assert same(model(**arguments), stock)
    assert any("modulation in" in reason for reason in handle.report()["ops"]["block"]["stock"])


def test_attention_by_name(model):
    if not torch.cuda.is_available():
        with pytest.raises(attention.AttentionUnavailable):
            host.accelerate(model, EAGER, attention=next(name for name in attention.CHOICES if "sage" in name.lower()))
    with pytest.raises(ValueError):
        host.accelerate(model, EAGER, attention="no such attention")
    assert not model._forward_hooks


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="got a Linear"):
        host.accelerate(torch.nn.Linear(2, 2))


def test_an_unknown_diffusers_runs_unpatched(model, monkeypatch):
    monkeypatch.setitem(host.SIGNATURES, f"{host.MODEL}:MiniMaxH3TransformerBlock.forward", (("self", "hidden_states", "new"), ()))
    before = places(model)
    handle = host.accelerate(model, EAGER)
    assert "unknown to this version" in handle.report()["stepped_aside"] and places(model) == before


def test_the_run_context_counts_one_run(model):
    with host.accelerate(model, EAGER) as handle:
        run(model)
        with handle.run():
            run(model)
    report = handle.report()
    assert report["model_calls"] == 2
    assert report["last_run_ops"]["gate_twice"]["fused"]["eager"] * 2 == report["ops"]["gate_twice"]["fused"]["eager"]

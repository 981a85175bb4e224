"""H3 Vortex in ComfyUI: :func:`accelerate` gives a clone of a ModelPatcher whose H3 blocks run the pack's ops, :func:`report` what ran.

Nothing global is touched. The clone gets one DIFFUSION_MODEL wrapper (which hands a runner for each live block to ``patches_replace``,
chaining any entry already there), one OUTER_SAMPLE wrapper that marks where a run starts and ends, and, only on cores whose compiler
cannot be paused, one APPLY_MODEL wrapper that runs the call without it. All are kept under one key: applying twice is applying once.
"""

from collections import Counter
from dataclasses import asdict, replace

import torch

from .. import attention as attentions
from . import checks, eligibility, ops, verification
from .core import MODEL, UnknownCore, attention_kernels, compiler_off, probe
from .ops import Features
from .report import Session, timed_run
from .runner import ModelCall

KEY = "h3_vortex"

__all__ = ["Features", "accelerate", "report"]


def accelerate(patcher, features: Features | None = None, attention: str = attentions.STOCK, mode: str = "exact"):
    """A clone of ``patcher`` whose MiniMax H3 blocks run this pack's ops: with stock's attention, the same bytes as stock.

    Args:
        patcher: ComfyUI ModelPatcher of a MiniMax H3 model, from any loader, with or without LoRAs; not changed.
        features: which fusions may run; default all of them (class E0).
        attention: one of :data:`..attention.CHOICES`. ``stock (exact)`` keeps what ComfyUI selected, by flag, node or checkpoint.
        mode: a word for the report.

    Returns:
        The clone. On a core this pack does not know it runs unpatched and its report says why.

    Raises:
        ValueError: unknown ``attention``; ``patcher`` holds another model than MiniMax H3.
        AttentionUnavailable: an attention backend by name that this machine cannot run.
    """
    attentions.plan(attention)
    clone = patcher.clone()
    session = Session(mode, attention)
    clone.set_attachments(KEY, session)
    try:
        core = probe()
    except UnknownCore as error:
        attentions.insist(attention, str(error))
        session.step_aside(str(error))
        return clone
    attentions.plan(attention, env=attentions.Environment.of(core.management.get_torch_device()))
    model = clone.model.diffusion_model
    if not core.is_h3(model):
        raise ValueError(f"H3 Vortex accelerates MiniMax H3 models, got a {type(model).__name__}: connect an H3 diffusion model")
    session.core = core.version()
    session.layers = dict(Counter(eligibility.kind(block) for block in model.blocks if not eligibility.foreign(block, MODEL)))
    for kind in (core.wrappers.DIFFUSION_MODEL, core.wrappers.OUTER_SAMPLE, core.wrappers.APPLY_MODEL):
        clone.remove_wrappers_with_key(kind, KEY)
    clone.add_wrapper_with_key(core.wrappers.DIFFUSION_MODEL, KEY, _model_wrapper(core, session, features or Features()))
    clone.add_wrapper_with_key(core.wrappers.OUTER_SAMPLE, KEY, _run_wrapper(session))
    if core.compiler.opt_out is not None:
        session.warn_once(f"H3 Vortex: sampling without the comfy compiler, because {core.compiler.opt_out}")
        clone.add_wrapper_with_key(core.wrappers.APPLY_MODEL, KEY, _compiler_wrapper(core))
    return clone


def session_of(patcher) -> Session | None:
    """The session of an accelerated patcher or of a later clone of one; None for any other."""
    return patcher.get_attachment(KEY)


def report(patcher) -> dict:
    """What an accelerated patcher did so far, JSON-ready.

    Returns:
        ``ops``: per op the fused calls by backend and the stock calls by reason; ``last_run_ops``: the same since the last run started;
        ``attention``: function, who chose it and its exactness class; ``verification``: every verdict of this process; ``timings``:
        milliseconds per op, stock and kernel, where H3 Warmup measured them; ``stepped_aside``: why the whole model runs stock, or
        None; ``layers``: how many blocks of each kind the model has; ``weights``: how many of its bytes were on the GPU at the last model
        call, None on the CPU.

    Raises:
        ValueError: ``patcher`` was not made by :func:`accelerate`.
    """
    session = session_of(patcher)
    if session is None:
        raise ValueError("this model was not accelerated by H3 Vortex: pass what accelerate() returned, or a clone of it")
    return session.report()


def _run_wrapper(session):
    def run(executor, *args, **kwargs):
        with timed_run(session, getattr(executor.class_obj, "model_patcher", None)):  # of the guider
            return executor(*args, **kwargs)

    return run


def _compiler_wrapper(core):
    def run(executor, *args, **kwargs):
        with compiler_off(core.arguments):
            return executor(*args, **kwargs)

    return run


def _model_wrapper(core, session, features):
    def run(executor, x, timestep, context, transformer_options={}, *args, **kwargs):  # noqa: B006  (the signature of what is wrapped)
        model = executor.class_obj
        reason = _model_problem(core, session, features, model, x, context)
        if reason is not None:
            attentions.insist(session.attention_choice, reason)
            session.step_aside(reason)
            try:
                return executor(x, timestep, context, transformer_options, *args, **kwargs)
            finally:
                session.note_weights()
        session.stepped_aside = None
        session.device = verification.device_name(x[0].device)
        options = transformer_options.copy()
        layout, plan = _layout(args, kwargs), _run_plan(core, session, model, options, x[0].device)
        call = ModelCall(core, session, features, _row_buffer(x, layout), plan, _prefix_rows(layout))
        options["patches_replace"] = replaced = dict(options.get("patches_replace", {}))
        replaced["dit"] = _block_replacements(call, model.blocks, replaced.get("dit", {}))
        try:
            return executor(x, timestep, context, options, *args, **kwargs)
        finally:
            call.release()
            session.finish_call(call.calls, call.rows_seen)

    return run


def _block_replacements(call, blocks, present) -> dict:
    """``present`` with a runner for every block; an entry already there is called first and reaches the runner as its original block.

    A block whose forward another pack owns gets none: newer cores call a replaced block with ``attention=``, which that forward may not
    know, and an unreplaced one without it.
    """
    entries = dict(present)
    for index, block in enumerate(blocks):
        reason = eligibility.foreign(block, MODEL)
        if reason is not None:
            attentions.insist(call.session.attention_choice, reason)
            call.calls.stock["block", reason] += 1
            continue
        entries["double_block", index] = _replacement(call, block, entries.get(("double_block", index)))
    return entries


def _replacement(call, block, previous):
    if previous is None:
        return lambda args, extra: call.block(block, args, extra["original_block"])

    def chained(args, extra):
        stock = extra["original_block"]
        return previous(args, {**extra, "original_block": lambda inner: call.block(block, inner, stock)})

    return chained


def _run_plan(core, session, model, options, device):
    """The attention plan of the run that this model call belongs to."""
    with session.lock:
        if device not in session.attention_plans:
            name, source = core.attention_function(model.blocks[0].attn, options)
            host = attentions.Host(
                override=f"an attention override ({name})" if source == "override" else None,
                declared=name if source == "checkpoint" else None, stock=attention_kernels(name, core.ops))
            session.attention_plans[device] = attentions.plan(
                session.attention_choice, host=host, pause=core.pause, env=attentions.Environment.of(device))
        return session.attention_plans[device]


def _layout(args, kwargs):
    """The packed layout that the core built before sampling, or None."""
    payload = kwargs.get("minimax_payload") or (args[0] if args and isinstance(args[0], dict) else {})
    return payload.get("layout")


def _row_buffer(x, layout) -> torch.Tensor | None:
    """Scratch for the row map, allocated here so that no block owns it."""
    length = getattr(layout, "seq_len", None)
    return None if length is None else torch.empty(length, dtype=torch.int32, device=x[0].device)


def _prefix_rows(layout) -> int:
    """Rows ahead of the target video, the last segment of the packed sequence."""
    segments = getattr(layout, "segments", None)
    return segments[-1][0] if segments else 0


def _model_problem(core, session, features, model, x, context) -> str | None:
    """Why this whole model call runs stock, or None. Verifies a block of every kind the model has, before its first use."""
    if torch.compiler.is_compiling():
        return "H3 Vortex: the model is being compiled by torch.compile, so it runs unpatched"
    if not core.is_h3(model):
        return f"H3 Vortex: the model is a {type(model).__name__}, so it runs unpatched"
    if core.in_training:
        return "H3 Vortex: training runs unpatched"
    device = x[0].device
    if not features.allow_eager:
        missing = ops.any_backend(device)
        if missing:
            return f"H3 Vortex: no accelerated kernel for {device.type} here, so stock runs ({missing})"
    for case, block in _kinds(core, model, features, context.dtype, device).items():
        file = verification.environment(device, core.digest)
        verdict = verification.known(case, file)
        if verdict is None:
            verdict = _verify_block(core, session, features, model, block, case, file, context.dtype, device)
        if not verdict.equal:
            return f"H3 Vortex: a whole block does not give stock's bytes, so the model runs unpatched: {verdict.note}"
    return None


def _verify_block(core, session, features, model, block, case, file, dtype, device):
    def run_block(args):
        # v is judged by itself, at a length where attention runs as it does in a job; schedules, on a job's own tensors
        call = ModelCall(core, session, replace(features, v_view=False, schedule=False), None)
        return call.block(block, args, lambda inner: {"img": block(**_forward_arguments(inner))})

    with core.pause():
        return verification.settle(case, file, lambda: checks.block(core, model, block, run_block, dtype, device))


def _forward_arguments(args) -> dict:
    return {"x": args["img"], **{key: args[key] for key in ("t_emb", "mod_segments", "rope_freqs", "transformer_options")}}


def _kinds(core, model, features, dtype, device) -> dict:
    """One block for every kind that the model holds, under the case by which its verdict is known."""
    kinds = {}
    off = " ".join(f"{name}={value}" for name, value in asdict(features).items() if value != getattr(Features, name))
    head = f"block {verification.device_name(device)} {str(dtype).removeprefix('torch.')} {off}".rstrip()
    for block in model.blocks:
        if eligibility.foreign(block, core.model.__name__) is not None:
            continue  # runs as its owner wants
        kinds.setdefault(f"{head} {eligibility.kind(block)}", block)
    return kinds

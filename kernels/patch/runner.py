"""One block of ComfyUI's H3 model, in stock's own sequence, with the ops of this pack where they may run.

Rules the code keeps (cores from 0.34 record GPU allocations per block; a rule broken there kills the process):

* the stream ``args["img"]`` is mutated in place and that very object is returned;
* every tensor made in a block dies in that block; what a model call needs throughout is made in the wrapper and dropped there;
* whether a piece is fused is decided from the call's arguments before the piece starts; nothing falls back from inside an ``except``.
"""

from dataclasses import replace

import torch

from .. import attention as attentions
from .. import segments
from . import checks, eligibility, ops, scheduled, side_path, verification
from .core import BLOCK_ARGUMENTS, VIEW_SAFE, view_case
from .decide import Deciding
from .report import Session

V_VIEW = "attention_v_view"  # stands for an op in the counts: stock's call is the copy of v
SIDE_PATH = "Turbo LoRA side path on this layer: its input is written out, and quantised from there"


class ModelCall(Deciding):
    """What the blocks of one model call share: features, counts and the row map. Made and released by the wrapper.

    Args:
        core: :class:`.core.Core`.
        session: where counts and verdicts are reported.
        features: :class:`.ops.Features`.
        row_buffer: int32 scratch for the row map, allocated by the wrapper, or None when the sequence length is not known yet.
        plan: the run's attention (:mod:`..attention`), or None for what ComfyUI would run.
        prefix_rows: rows ahead of the target video.
    """

    def __init__(self, core, session: Session, features: ops.Features, row_buffer: torch.Tensor | None, plan=None, prefix_rows: int = 0):
        super().__init__(session, features, core.digest, core.pause)
        self.core = core
        self.plan, self.prefix_rows = plan, prefix_rows
        self._row_buffer = row_buffer
        self._row_map = self._segments = self._override = None
        self._described = False

    def release(self) -> None:
        """Drop what the wrapper allocated, whoever still holds this object."""
        self._row_buffer = self._row_map = self._segments = None

    # -- one block -----------------------------------------------------------------------------------------------------------------

    def block(self, block, args: dict, original) -> dict:
        """Run ``block`` on replace-``args``; ``original`` is the stock call with the same arguments."""
        reason = self._whole_block_problem(block, args)
        if reason is not None:
            self._insist(reason)
            self.calls.stock["block", reason] += 1
            return original(args)
        x = args["img"]
        self.rows_seen = x.shape[0]
        runs = args["mod_segments"]
        rows = self._rows(runs, x)
        tables = block.adaln_proj(args["t_emb"])
        problems = [eligibility.norm_problem(norm, x, self.core.ops.__name__) for norm in (block.norm1, block.norm2)]
        if not any(problems):  # else a norm may give another dtype than the stream's, and stock rounds to that
            tables = _rounded(tables, x.dtype)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = tables

        attn, mlp = block.attn, block.mlp
        attention = args.get("attention")
        if attention is not None:
            elsewhere = "another node supplies the attention"
        else:
            elsewhere = eligibility.foreign(attn, self.core.model.__name__)
        if elsewhere:
            self._insist(elsewhere)
        takes = eligibility.Input() if elsewhere else self._takes(attn.qkv_proj, x)
        form = self._in_front(attn.qkv_proj, takes)
        h = self._norm_modulate(block.norm1, problems[0], x, None, None, shift_msa, scale_msa, runs, rows, form)
        if elsewhere:
            self.calls.stock["attention", elsewhere] += 1
            self.session.attention = {"backend": "not this pack's", "chosen_by": elsewhere, "class": "as without this pack"}
            other = (attention or attn)(h, rope_freqs=args["rope_freqs"], transformer_options=args["transformer_options"])
            del h
        else:
            box = [self._project(attn.qkv_proj, h, x, takes)]
            del h
            heads = self._attention(attn, box, args)
            other = self._out_proj(attn.out_proj, heads)
            del heads

        elsewhere = eligibility.foreign(mlp, self.core.model.__name__)
        takes = eligibility.Input() if elsewhere else self._takes(mlp.fc1, x)
        form = self._in_front(mlp.fc1, takes)
        h = self._norm_modulate(block.norm2, problems[1], x, gate_msa, other, shift_mlp, scale_mlp, runs, rows, form)
        del other
        if elsewhere:
            self.calls.stock["mlp", elsewhere] += 1
            other = mlp(h)
        else:
            box = [self._project(mlp.fc1, h, x, takes)]
            del h
            other = self._fc2(mlp.fc2, box)
        self._gate(x, other, gate_mlp, runs, rows)
        return {"img": x}

    def _insist(self, reason: str) -> None:
        """Another attention is about to run for ``reason``: not in place of one that was asked for by name (a verification has no plan)."""
        if self.plan is not None:
            attentions.insist(self.plan.choice, reason)

    def _whole_block_problem(self, block, args) -> str | None:
        core = self.core
        unknown = sorted(set(args) - BLOCK_ARGUMENTS)
        if unknown:
            return f"unknown block argument {unknown[0]!r}"
        if core.in_training or args["img"].requires_grad:
            return "training"
        x = args["img"]
        if x.dim() != 2 or x.stride(-1) != 1 or args["rope_freqs"] is None:
            return f"unexpected packed stream {list(x.shape)}"
        return eligibility.foreign(block, core.model.__name__)

    def _rows(self, runs, x) -> torch.Tensor:
        """The row map of this model call, written once into the wrapper's scratch."""
        if runs is self._segments:
            return self._row_map
        if self._segments is not None:  # another pack gave this block its own segments: a map of its own, which dies with the block
            return segments.row_map(runs, x.shape[0], x.device)
        if self._row_buffer is None or self._row_buffer.shape[0] != x.shape[0]:
            with self.core.pause():  # kept until the wrapper ends, so not one of this block's allocations
                self._row_map = segments.row_map(runs, x.shape[0], x.device)
        else:
            per_token = any(isinstance(row, torch.Tensor) for _, _, row in runs)
            self._row_map = self._row_buffer.copy_(segments.row_map(runs, x.shape[0], x.device if per_token else "cpu"))
        self._segments = runs
        return self._row_map

    # -- choosing an op ---------------------------------------------------------------------------------------------------------------

    def compare(self, name, args):
        return checks.compare(self.core, name, args)

    def time(self, name, args):
        return checks.time(self.core, name, args)

    def _takes(self, linear, x) -> eligibility.Input:
        takes = eligibility.linear_input(linear, x, self.core.ops.__name__)
        if takes.form == "nvfp4":
            takes = replace(takes, scale=self.core.input_scale(linear, x))
        elif takes.form == "int8":
            reason = ops.int8_gemm_problem(x, linear.weight.shape[1])
            if reason is not None:
                takes = eligibility.Input(layout=takes.layout, reason=reason)
        if takes.reason is not None:
            self.calls.stock[f"quantised input ({takes.layout})", takes.reason] += 1
        return takes

    def _in_front(self, linear, takes) -> eligibility.Input:
        """The form that the op in front of ``linear`` writes: a branch beside the layer needs the activation itself."""
        if takes.form == "plain" or not eligibility.side_paths(linear):
            return takes
        self.calls.stock[f"quantised input ({takes.layout})", SIDE_PATH] += 1
        return eligibility.Input()

    # -- pieces -----------------------------------------------------------------------------------------------------------------------

    def _norm_modulate(self, norm, problem, x, gate, other, shift, scale, runs, rows, takes):
        """Gated residual (when ``gate`` is given), norm and modulation of ``x`` in the form the next Linear takes.

        ``problem``: why ``norm`` cannot be part of an op, or None.
        """
        if problem is None:
            with self.core.norm_weight(norm, x) as weight:
                if gate is not None:
                    if _branch_problem(x, other) is None:
                        h = self._modulated("gate_norm_modulate", takes, (x, other, gate, weight, shift, scale, rows, norm.eps), x)
                        if h is not None:
                            return h
                    self._gate(x, other, gate, runs, rows)
                h = self._modulated("norm_modulate", takes, (x, weight, shift, scale, rows, norm.eps), x)
                if h is not None:
                    return h
        else:
            self.calls.stock["norm_modulate", problem] += 1
            if gate is not None:
                self._gate(x, other, gate, runs, rows)
        h = norm(x)
        if takes.form == "nvfp4":
            triple = self._try("modulate_nvfp4", h, shift, scale, rows, takes.scale)
            if triple is not None:
                return self._nvfp4(triple, h)
        if self._try("modulate", h, shift, scale, rows) is None:
            h = self.core.model._mod_scale_shift(h, shift, scale, runs)
        return h

    def _modulated(self, stem, takes, args, x):
        """``stem`` or its quantising form; None when neither may run."""
        if takes.form == "nvfp4":
            triple = self._try(f"{stem}_nvfp4", *args, takes.scale)
            if triple is not None:
                return self._nvfp4(triple, x)
        elif takes.form == "int8":
            pair = self._try(f"{stem}_int8", *args)
            if pair is not None:
                return pair
        return self._try(stem, *args)

    def _nvfp4(self, triple, like):
        return ops.as_quantized(triple, like.dtype, tuple(like.shape))

    def _gate(self, x, other, gate, runs, rows) -> None:
        problem = _branch_problem(x, other)
        if problem is not None:
            self.calls.stock["gate", problem] += 1
        if problem is not None or self._try("gate", x, other, gate, rows) is None:
            self.core.model._mod_gate(x, gate, other, runs)

    def _linear(self, linear, h, like):
        """``linear(h)``; an INT8 pair goes to kitchen's GEMM with the weight that the layer's own forward would use."""
        if not isinstance(h, tuple):
            return self._scheduled(linear, h, linear)
        with self.core.int8_weight(linear, like) as (qdata, scale):
            return ops.int8_gemm(h, qdata, scale, like.dtype)

    def _project(self, linear, h, like, takes):
        """``linear`` of ``h``, quantised already or not; with a branch beside it, ``h`` is plain and quantised here for the base."""
        if takes.form == "plain" or not eligibility.side_paths(linear):
            return self._linear(linear, h, like)
        return self._quantise_and_project(linear, h, takes)

    def _quantise_and_project(self, linear, h, takes):
        """``linear`` of plain ``h``, its base product from ``h`` quantised here where that may be."""
        ready = self._quantised(h, takes)
        if ready is None:
            return linear(h)
        out = self._base(linear, ready, h)
        del ready  # a branch allocates
        return self._beside(linear, h, out)

    def _quantised(self, h, takes):
        """Plain ``h`` in the form that a Linear takes, or None when it takes plain input or the op may not run."""
        if takes.form == "nvfp4":
            triple = self._try("nvfp4_quantize", h, takes.scale)
            return None if triple is None else self._nvfp4(triple, h)
        return self._try("quantize_rotate_int8", h) if takes.form == "int8" else None

    def _base(self, linear, ready, like):
        """The layer's own product of a quantised input, without the branches beside it."""
        return self._linear(linear, ready, like) if isinstance(ready, tuple) else self._scheduled(linear, ready, linear.forward)

    def _scheduled(self, linear, h, call):
        """``call(h)``, or for an NVFP4 ``h`` the product through a schedule that was proved equal and faster here."""
        if self.features.schedule and isinstance(h, self.core.QuantizedTensor):
            out = scheduled.linear(self.core, self.calls, linear, h)
            if out is not None:
                return out
        return call(h)

    def _beside(self, linear, h, out):
        """``out`` with the branches of plain ``h``."""
        for branch in eligibility.side_paths(linear):
            out = branch.add(h, out)
        return out

    def _attention(self, attn, box, args) -> torch.Tensor:
        """Attention of the fused projection in ``box`` (emptied: nobody else keeps it alive). Returns ``[S, heads * D]``."""
        qkv = box.pop()
        count = qkv.shape[0]
        q, k, v = (t.view(count, attn.heads, attn.head_dim) for t in qkv.split(attn.heads * attn.head_dim, dim=-1))
        del qkv
        q_weight, k_weight = self.core.head_weights(attn, q.device)
        if self._try("qk_norm_rope", q, k, args["rope_freqs"], q_weight, k_weight, attn.q_norm.eps) is None:
            rope = args["rope_freqs"]
            self.core.kitchen.rms_rope_split_half_(
                q[None], k[None], rope, q_weight, k_weight, epsilon=attn.q_norm.eps, rot_dim=rope.shape[-3] * 2)
        options = args["transformer_options"]
        if self.plan is not None and not self.plan.is_stock:
            return self._planned_attention(attn, q, k, v, options)
        if not self._described:
            self.session.attention, self._described = self._describe_attention(attn, options), True
        if self.core.clones_v and not self._v_may_be_a_view(attn, v, options):
            v = v.clone()
        heads = [q, k, v]
        del q, k, v
        return self.core.attend(attn, heads, options)

    def _planned_attention(self, attn, q, k, v, options) -> torch.Tensor:
        # decided before the plan pauses the allocation graph: a verdict on v pauses it too, and pauses do not nest
        copy_v = self.plan.backend is None and self.core.clones_v and not self._v_may_be_a_view(attn, v, options)

        def stock(q, k, v):
            return self.core.attend(attn, [q[0], k[0], v[0].clone() if copy_v else v[0]], options)

        out = self.plan(q[None], k[None], v[None], stock, self.prefix_rows)
        self.session.attention = self._describe_attention(attn, options)
        return out

    def _attention_function(self, attn, options) -> tuple[str, str]:
        """``core.attention_function``; an override is the same for every block of a call and is looked into once."""
        if "optimized_attention_override" not in options:
            return self.core.attention_function(attn, options)
        if self._override is None:
            self._override = self.core.attention_function(attn, options)
        return self._override

    def _describe_attention(self, attn, options) -> dict:
        name, source = self._attention_function(attn, options)
        told = {"backend": name, "chosen_by": source, "class": "E0"}
        if self.plan is not None:
            report = self.plan.report()
            if not self.plan.is_stock:
                told = {"backend": report["backend"], "chosen_by": "this node", "class": report["exactness"]}
            told |= {key: report[key] for key in ("why", "copies", "relative_error", "measured") if report[key]}
        return told

    def _v_may_be_a_view(self, attn, v, options) -> bool:
        name, _ = self._attention_function(attn, options)
        reason = None
        if not self.features.v_view:
            reason = "switched off"
        elif v.device.type != "cuda" or name not in VIEW_SAFE:
            reason = f"{name} on {v.device.type} is not known to give the same bytes for a view"
        elif v.shape[0] * v.stride(0) >= 2**31:
            reason = "the projection spans 2^31 elements or more, where some attention kernels count in 32 bits"
        else:
            case = view_case(name, self.core.ops, attn, v)
            count = min(v.shape[0], verification.TIMED_ROWS)
            device, dtype = v.device, v.dtype
            verdict = self._verdict(
                case, device, lambda: checks.attention_v(self.core, attn, options, dtype, device, count))
            reason = None if verdict.equal else verdict.note
        if reason is None:
            self.calls.fused[V_VIEW, name] += 1
        else:
            self.calls.stock[V_VIEW, reason] += 1
        return reason is None

    def _out_proj(self, linear, heads):
        return self._quantise_and_project(linear, heads, self._takes(linear, heads))

    def _fc2(self, linear, box):
        """SwiGLU and FC2 of the ``[gate | up]`` in ``box`` (emptied). Stock folds the activation into kitchen's quantiser for INT8 only."""
        gate_up = box.pop()
        half = gate_up[:, : gate_up.shape[1] // 2]
        takes = self._takes(linear, half)
        if takes.form == "int8":
            pair = self._try("swiglu_int8", gate_up)
            if pair is not None:
                out = self._linear(linear, pair, half)
                del pair  # as large as half of what a branch needs here
                return self._fc2_branches(linear, gate_up, out)
        elif self._in_front(linear, takes).form == "nvfp4":
            triple = self._try("swiglu_nvfp4", gate_up, takes.scale)
            if triple is not None:
                h = self._nvfp4(triple, half)
                del gate_up, half
                return self._scheduled(linear, h, linear)
        if getattr(linear.weight, "_layout_cls", None) == eligibility.INT8:
            return side_path.swiglu_linear(self.core.ops, linear, gate_up)
        h = self._try("swiglu", gate_up)
        if h is None:
            return side_path.swiglu_linear(self.core.ops, linear, gate_up)
        del gate_up, half
        return self._project(linear, h, h, takes)

    def _fc2_branches(self, linear, gate_up, out):
        """``out`` of an INT8 FC2 with the branches beside it: the base product took its input from ``gate_up`` directly."""
        if not eligibility.side_paths(linear):
            return out
        h = self._try("swiglu", gate_up)
        return self._beside(linear, self.core.ops.INPUT_ACT_EAGER["swiglu"](gate_up) if h is None else h, out)


def _rounded(tables, dtype):
    """AdaLN tables in ``dtype``: once per block what stock does at each use. Core's are the chunks of one tensor: one launch."""
    first = tables[0]
    if first.dtype == dtype:
        return tables
    (rows, width), stride = first.shape, first.stride()
    step = width * first.element_size()
    whole = stride == (len(tables) * width, 1) and all(
        t.dtype == first.dtype and t.stride() == stride and t.data_ptr() == first.data_ptr() + i * step for i, t in enumerate(tables))
    if not whole:  # another pack's projection
        return [table.to(dtype) for table in tables]
    return first.as_strided((rows, len(tables) * width), stride).to(dtype).chunk(len(tables), dim=-1)


def _branch_problem(x, other) -> str | None:
    """Why no op adds ``other`` to the stream ``x``, or None. Core's own branches always fit; stock takes others, such as wider ones."""
    if other.dtype == x.dtype and other.shape == x.shape and other.device == x.device:
        return None
    return f"the branch is {other.dtype} {list(other.shape)} on {other.device}, the stream {x.dtype} {list(x.shape)} on {x.device}"

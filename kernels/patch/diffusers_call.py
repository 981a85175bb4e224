"""One model call through diffusers' H3 blocks: the blocks' own sequence with the ops of this pack where they may run.

The source mirrored is ``MiniMaxH3TransformerBlock.forward`` and ``MiniMaxH3AttnProcessor.__call__`` of diffusers 0.42
(``models/transformers/transformer_minimax_h3.py``) and ``FeedForward`` and ``SwiGLU`` (``models/attention.py``, ``models/activations.py``).

Stock makes a new residual stream twice per block. Here the stream is updated in place, which nobody can see as long as nobody else holds
it: with any hook on a block, or on the norms that read the stream, it is copied first, so hooks may keep what they were given.
"""

import copy
import importlib
from dataclasses import asdict

import torch

from .. import attention as attentions
from . import checks, eligibility, ops, verification
from .decide import Deciding
from .ops import Features
from .report import Calls

MODEL = "diffusers.models.transformers.transformer_minimax_h3"
NORM, FEED_FORWARD, ACTIVATION = "torch.nn.modules.normalization", "diffusers.models.attention", "diffusers.models.activations"


class BlockCall(Deciding):
    """What the blocks of one model call share. Made when the transformer's forward starts, dropped when it ends.

    Args:
        session, features: as in ComfyUI.
        host_digest: :func:`.diffusers.host_digest`.
        transformer: the model whose forward has begun.
    """

    def __init__(self, session, features: Features, host_digest: str, transformer):
        super().__init__(session, features, host_digest)
        self.model = importlib.import_module(MODEL)
        self._keep_stream = any(_watched(block) or _watched(block.norm1) for block in transformer.transformer_blocks)
        self._rope_freq_dim = transformer.rope.rope_freq_dim
        self._source = self._rows = self._angles = self._freqs = self._plan = None
        self._described = self._checking = False

    # -- one block ----------------------------------------------------------------------------------------------------------------

    def block(self, block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask) -> torch.Tensor:
        """``block(...)``: arguments and result are those of its own forward."""
        arguments = (hidden_states, temb, adaln_indices, rotary_emb, attention_mask)
        reason = self._problem(block, *arguments)
        if reason is not None:
            self.calls.stock["block", reason] += 1
            attentions.insist(self.session.attention_choice, reason)
            return type(block).forward(block, *arguments)
        self.rows_seen, self.session.device = hidden_states.shape[1], verification.device_name(hidden_states.device)
        return self._run(block, *arguments)

    def _problem(self, block, x, temb, adaln_indices, rotary_emb, attention_mask) -> str | None:
        """Why the whole block runs stock, or None. A block of every kind is verified before its first use."""
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in block.parameters())):
            return "gradients are recorded; run under torch.no_grad()"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast is on"
        if x.dim() != 3 or x.shape[0] != 1 or not x.is_contiguous():
            return f"hidden states {list(x.shape)} with strides {list(x.stride())}; one contiguous sequence was expected"
        if rotary_emb is None or adaln_indices.shape != x.shape[1:2]:
            return "no rotary embedding, or not one modulation row per token"
        missing = None if self.features.allow_eager else ops.any_backend(x.device)
        if missing is not None:
            self.session.step_aside(f"H3 Vortex: no accelerated kernel for {x.device.type} here, so stock runs ({missing})")
            return missing
        return self._block_verdict(block, x, temb)

    def _run(self, block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask) -> torch.Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.adaln_proj(temb)
        x = hidden_states[0]
        if gate_msa.dtype != x.dtype:
            reason = f"modulation in {gate_msa.dtype}, activations in {x.dtype}"
            self._insist(reason)
            self.calls.stock["block", reason] += 1
            return type(block).forward(block, hidden_states, temb, adaln_indices, rotary_emb, attention_mask)
        rows = self._row_map(adaln_indices)

        h = self._norm_modulate(block.norm1, x, shift_msa, scale_msa, rows, adaln_indices)
        other = self._attention(block.attn, h[None], rotary_emb, attention_mask)[0]
        del h
        if self._keep_stream:  # from here on the stream is written to
            x = x.clone()
        weight, problem = self._norm_weight(block.norm2, x)
        h = None
        if problem is None and other.dtype == x.dtype:
            h = self._try("gate_norm_modulate_twice", x, other, gate_msa, weight, shift_mlp, scale_mlp, rows, block.norm2.eps)
        if h is None:
            x = self._gate(x, other, gate_msa, rows, adaln_indices)
            h = self._norm_modulate(block.norm2, x, shift_mlp, scale_mlp, rows, adaln_indices)
        del other
        other = self._feed_forward(block.ff, h[None])[0]
        del h
        if _watched(block.norm2):
            x = x.clone()
        return self._gate(x, other, gate_mlp, rows, adaln_indices)[None]

    # -- pieces -----------------------------------------------------------------------------------------------------------------------

    def _row_map(self, adaln_indices) -> torch.Tensor:
        if adaln_indices is not self._source:  # a rank's own shard of it is a new tensor for every block
            self._source, self._rows = adaln_indices, adaln_indices.to(torch.int32)
        return self._rows

    def _norm_weight(self, norm, x):
        """(weight, None) when ``norm`` may be part of a fused op for ``x`` [S, H], else (None, why not)."""
        problem = eligibility.foreign(norm, NORM)
        if problem is None and (norm.weight is None or norm.eps is None or norm.weight.shape != x.shape[1:]):
            problem = "RMSNorm without a weight of the width, or without eps"
        if problem is None and (norm.weight.dtype != x.dtype or norm.weight.device != x.device):
            problem = f"RMSNorm weight is {norm.weight.dtype} on {norm.weight.device}, activations are {x.dtype} on {x.device}"
        return (norm.weight, None) if problem is None else (None, problem)

    def _norm_modulate(self, norm, x, shift, scale, rows, adaln_indices) -> torch.Tensor:
        weight, problem = self._norm_weight(norm, x)
        if problem is None:
            h = self._try("norm_modulate", x, weight, shift, scale, rows, norm.eps)
            if h is not None:
                return h
        else:
            self.calls.stock["norm_modulate", problem] += 1
        h = norm(x[None])[0]
        fused = self._try("modulate", h, shift, scale, rows) if h.dtype == shift.dtype and not _watched(norm) else None
        return stock_modulate(h, shift, scale, adaln_indices) if fused is None else fused

    def _gate(self, x, other, gate, rows, adaln_indices) -> torch.Tensor:
        fused = self._try("gate_twice", x, other, gate, rows) if x.dtype == other.dtype == gate.dtype else None
        return stock_gate(x, other, gate, adaln_indices) if fused is None else fused

    def _attention(self, attn, h, rotary_emb, attention_mask) -> torch.Tensor:
        processor = attn.processor
        elsewhere = eligibility.foreign(attn, MODEL)
        if elsewhere is None and type(processor) is not self.model.MiniMaxH3AttnProcessor:
            elsewhere = f"its processor is a {type(processor).__name__}"
        if elsewhere is not None:
            self._insist(elsewhere)
            self.calls.stock["attention", elsewhere] += 1
            self._tell_attention({"backend": "not this pack's", "chosen_by": elsewhere, "class": "as without this pack"})
            return attn(h, rotary_emb, attention_mask)
        if attn.fused_projections:
            query, key, value = attn.to_qkv(h).chunk(3, dim=-1)
            query, key = query.contiguous(), key.contiguous()
        else:
            query, key, value = attn.to_q(h), attn.to_k(h), attn.to_v(h)
        query, key, value = (t.unflatten(-1, (attn.heads, -1)) for t in (query, key, value))
        query, key = self._norm_rope(attn, query, key, rotary_emb)
        heads = self._attend(processor, query, key, value, attention_mask).type_as(query)
        del query, key, value
        return attn.to_out[1](attn.to_out[0](heads))

    def _norm_rope(self, attn, query, key, rotary_emb):
        q_weight, problem = self._norm_weight(attn.norm_q, query[0, :, 0])
        k_weight, other_problem = self._norm_weight(attn.norm_k, key[0, :, 0])
        problem = problem or other_problem or ("two eps" if attn.norm_q.eps != attn.norm_k.eps else None)
        if problem is None:
            freqs = self._rotation(rotary_emb, query.dtype)
            if self._try("qk_norm_rope_torch", query[0], key[0], freqs, q_weight, k_weight, attn.norm_q.eps) is not None:
                return query, key
        else:
            self.calls.stock["qk_norm_rope_torch", problem] += 1
        rotate = self.model._apply_rotary_emb
        return rotate(attn.norm_q(query), *rotary_emb), rotate(attn.norm_k(key), *rotary_emb)

    def _rotation(self, rotary_emb, dtype) -> torch.Tensor:
        """``[1, S, 1, rot/2, 2, 2]`` rotation matrices of the ``cos``, ``sin`` [S, rot] that all blocks share, whose halves are alike."""
        if rotary_emb[0] is not self._angles:
            cos, sin = (t[:, : t.shape[1] // 2].to(dtype) for t in rotary_emb)
            self._angles = rotary_emb[0]
            self._freqs = torch.stack([cos, -sin, sin, cos], dim=-1).reshape(1, cos.shape[0], 1, cos.shape[1], 2, 2)
        return self._freqs

    def _insist(self, reason: str) -> None:
        """Another attention is about to run for ``reason``: not in place of one that was asked for by name."""
        if not self._checking:
            attentions.insist(self.session.attention_choice, reason)

    def _attend(self, processor, query, key, value, attention_mask) -> torch.Tensor:
        """``[1, S, heads * D]``: diffusers' dispatch, or the backend chosen on the handle."""
        def stock(query, key, value):
            return self.model.dispatch_attention_fn(
                query, key, value, attn_mask=attention_mask, dropout_p=0.0, is_causal=False, backend=processor._attention_backend,
                parallel_config=processor._parallel_config).flatten(2, 3)

        elsewhere = "the call has an attention mask" if attention_mask is not None else None
        if processor._parallel_config is not None:
            elsewhere = "diffusers runs its attention over several devices"
        if elsewhere is not None:
            self._insist(elsewhere)
        if self._checking or elsewhere is not None:
            out, told = stock(query, key, value), None
        else:
            plan = self._attention_plan(query.device, processor)
            out = stock(query, key, value) if plan.is_stock else plan(query, key, value, lambda q, k, v: stock(q, k, v)[0])[None]
            report = plan.report()
            told = None if plan.is_stock else {
                "backend": report["backend"], "chosen_by": "accelerate", "class": report["exactness"],
                **{key: report[key] for key in ("why", "copies", "relative_error", "measured") if report[key]}}
        name = processor._attention_backend or self._active_backend()
        self._tell_attention(told or {"backend": f"diffusers {getattr(name, 'value', name)}", "chosen_by": "diffusers", "class": "E0"})
        return out

    def _active_backend(self):
        return importlib.import_module("diffusers.models.attention_dispatch")._AttentionBackendRegistry.get_active_backend()[0]

    def _attention_plan(self, device, processor):
        if self._plan is None:
            session = self.session
            with session.lock:
                if device not in session.attention_plans:
                    chosen = processor._attention_backend
                    session.attention_plans[device] = attentions.plan(
                        session.attention_choice, env=attentions.Environment.of(device),
                        host=attentions.Host(
                            override=f"set_attention_backend({chosen!r})" if chosen is not None else None,
                            stock=f"diffusers {self._active_backend()}"))
                self._plan = session.attention_plans[device]
        return self._plan

    def _tell_attention(self, told: dict) -> None:
        if not self._described and not self._checking:
            self.session.attention, self._described = told, True

    def _feed_forward(self, ff, h) -> torch.Tensor:
        elsewhere = eligibility.foreign(ff, FEED_FORWARD)
        if elsewhere is None:
            net = ff.net
            if len(net) != 3 or type(net[0]).__name__ != "SwiGLU" or type(net[1]) is not torch.nn.Dropout:
                elsewhere = "layers other than SwiGLU, Dropout, Linear"
            else:
                elsewhere = eligibility.foreign(net[0], ACTIVATION) or eligibility.foreign(net[0].activation, "torch.nn.modules.activation")
        if elsewhere is not None:
            self.calls.stock["feed forward", elsewhere] += 1
            return ff(h)
        value_gate = net[0].proj(h)
        act = self._try("swiglu_value_gate", value_gate[0])
        if act is None:
            value, gate = value_gate.chunk(2, dim=-1)
            act = (value * net[0].activation(gate))[0]
            del value, gate
        del value_gate
        return net[2](net[1](act[None]))

    # -- verification ---------------------------------------------------------------------------------------------------------------

    def compare(self, name, args):
        return checks.against(self._stock, name, args)

    def time(self, name, args):
        return checks.time_against(self._stock, name, args)

    def _stock(self, name, a) -> list:
        """diffusers' statements for one op on a :func:`.checks.sample`, shaped as its blocks have them."""
        name = ops.stem(name)
        if name == "qk_norm_rope":
            cos, sin = (torch.cat([t, t], dim=-1) for t in (a.freqs[0, :, 0, :, 0, 0], a.freqs[0, :, 0, :, 1, 0]))
            for x, weight in ((a.q, a.q_weight), (a.k, a.k_weight)):
                normed = torch.nn.functional.rms_norm(x[None], weight.shape, weight, a.eps)
                x.copy_(self.model._apply_rotary_emb(normed, cos, sin)[0])
            return [a.buffer]
        if name == "swiglu":
            value, gate = a.gate_up[None].chunk(2, dim=-1)
            return [(value * torch.nn.functional.silu(gate))[0]]
        if name == "modulate":
            return [stock_modulate(a.h, a.shift, a.scale, a.rows.long())]
        gated = []
        if "gate" in name:
            a.x = stock_gate(a.x, a.other, a.gate, a.rows.long())
            gated = [a.x]
            if name == "gate":
                return gated * 2  # the op returns x, which is also what it wrote to
        h = torch.nn.functional.rms_norm(a.x[None], a.weight.shape, a.weight, a.eps)[0]
        return [stock_modulate(h, a.shift, a.scale, a.rows.long()), *gated]

    def _block_verdict(self, block, x, temb) -> str | None:
        """None when a block of this kind gives stock's bytes on a small packed sequence, else why it must not be used."""
        if self._checking:
            return None
        off = " ".join(f"{key}={value}" for key, value in asdict(self.features).items() if value != getattr(Features, key))
        case = (f"diffusers block {verification.device_name(x.device)} {x.dtype} {off}".rstrip()
                + f" {block.attn.heads}x{block.attn.head_dim} {list(x.shape[2:])} {kind(block)}")
        verdict = self._verdict(case, x.device, lambda: self._compare_block(block, x, temb))
        return None if verdict.equal else f"a whole block does not give stock's bytes: {verdict.note}"

    def _compare_block(self, block, x, temb) -> tuple[list, list]:
        rows, processor = verification.SAMPLE_ROWS, block.attn.processor
        sample = verification.activations(rows, x.shape[2], x.dtype, x.device, 0, poison=False)[None]
        picks = verification.segments(rows, temb.shape[0] * self.model.MINIMAX_H3_MODALITY_NUM, 0)
        index = torch.cat([torch.full((stop - start,), row, dtype=torch.long) for start, stop, row in picks]).to(x.device)
        positions = torch.rand(rows, 3, generator=torch.Generator("cpu").manual_seed(0)) * 100
        rope = self.model.MiniMaxH3RotaryPosEmbed(self._rope_freq_dim).to(x.device)(positions.to(x.device))
        parallel = getattr(processor, "_parallel_config", None)
        trial = copy.copy(self)
        trial._checking, trial._keep_stream, trial.calls = True, False, Calls()
        trial._source = trial._angles = None
        try:
            processor._parallel_config = None  # other ranks may know the verdict already and would not take part
            for _ in range(2):  # the first attention call of a process may take another backend than every later one
                stock = type(block).forward(block, sample.clone(), temb, index, rope, None)
            return [trial.block(block, sample, temb, index, rope, None)], [stock]
        finally:
            processor._parallel_config = parallel


def stock_modulate(h, shift, scale, rows) -> torch.Tensor:
    """diffusers' modulation of ``h`` [S, H] by one table row per token (int64 ``rows``), three roundings."""
    return h * (1.0 + scale.index_select(0, rows)) + shift.index_select(0, rows)


def stock_gate(x, other, gate, rows) -> torch.Tensor:
    """diffusers' gated residual, two roundings."""
    return x + gate.index_select(0, rows) * other


def _watched(module) -> bool:
    """Whether a hook on ``module`` may keep its inputs or outputs."""
    registry = getattr(module, "_diffusers_hook", None)
    return bool(module._forward_hooks or module._forward_pre_hooks or getattr(registry, "hooks", None) or hasattr(module, "_hf_hook"))


def kind(block) -> str:
    """The classes and dtypes that decide a block's course."""
    layers = (block.norm1, block.attn, block.attn.processor, block.norm2, block.ff, block.ff.net[0], block.adaln_proj)
    parts = [type(layer).__name__ for layer in layers]
    return " ".join([*parts, *sorted({str(p.dtype) for p in block.parameters()})])

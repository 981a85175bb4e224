"""Any backend on a few heads at a time: its workspace and its copies shrink by the number of groups, the output does not."""

import torch

from .backend import Backend

GROUP = 8  # heads; a seventh of H3's 56


class HeadSliced(Backend):
    """``head_sliced:NAME``. Heads are independent, but quantisers that look at a whole tensor may give other bytes: at least E1."""

    def __init__(self, inner: Backend, group: int = GROUP):
        self.inner, self.group = inner, group
        self.name = f"head_sliced:{inner.name}"
        self.exactness = max("E1", inner.exactness)
        self.pausable, self.max_error = inner.pausable, inner.max_error
        self.distributions = inner.distributions

    def missing(self, env):
        return self.inner.missing(env)

    def scope(self, call):
        return call.with_heads(min(self.group, call.heads))

    def refuses(self, call, env):
        return self.inner.refuses(call, env)

    def limits(self, call, env):
        return self.inner.limits(call, env)

    def launch(self, q, k, v, copies=(), prefix_rows=0):
        _, rows, heads, head_dim = q.shape
        out = torch.empty(rows, heads * head_dim, dtype=q.dtype, device=q.device)
        for a in range(0, heads, self.group):
            b = min(a + self.group, heads)
            part = self.inner.launch(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], copies, prefix_rows)
            out[:, a * head_dim : b * head_dim] = part
        return out

"""Whether an op runs in place of stock's calls, in any host: switched on, able to run here, verified on this machine, counted."""

import contextlib
import functools

import torch

from ..dispatch import use_backend
from . import ops, verification
from .report import Calls, Session


def _on_backend(backend: str, judge, name: str, args):
    with use_backend(backend):
        return judge(name, args)


class Deciding:
    """What the blocks of one model call share, without knowing a host: features, counts and verdicts.

    A host adds :meth:`compare` and :meth:`time`, the digest of its own sources, and ``pause`` where one-off work needs a context.
    """

    def __init__(self, session: Session, features: ops.Features, host_digest: str, pause=contextlib.nullcontext):
        self.session, self.features = session, features
        self.calls = Calls()
        self.rows_seen = 0
        self._host_digest, self._pause = host_digest, pause
        # the blocks of a model call repeat themselves: a look-up in place of a case's text
        self._verdicts: dict[tuple, verification.Verdict] = {}

    def compare(self, name: str, args) -> tuple[list, list]:
        """Results of our op and of the host's chain on one sample like ``args``."""
        raise NotImplementedError

    def time(self, name: str, args) -> tuple[float, float]:
        """Milliseconds (stock, ours) on :data:`.verification.TIMED_ROWS` rows."""
        raise NotImplementedError

    def _try(self, name: str, *args):
        """Result of op ``name``, verified; None (no op returns that) with the reason counted when stock must run instead."""
        args = ops.complete(name, args)
        backend, reason = ops.backend(name, self.features, args)
        if reason is None:
            device = args[0].device
            key = name, backend, *((arg.dtype, arg.shape, device) if isinstance(arg, torch.Tensor) else arg for arg in args)
            verdict = self._verdicts.get(key)
            if verdict is None:
                # the sample is aligned where the call may not be, so the backend of the call is asked for by name
                verdict = self._verdicts[key] = self._verdict(
                    ops.case(name, backend, args, device), device,
                    *(functools.partial(_on_backend, backend, judge, name, args) for judge in (self.compare, self.time)))
            if not verdict.equal:
                backend, reason = None, f"bytes not those of stock: {verdict.note}"
        if reason is not None:
            self.calls.stock[name, reason] += 1
            return None
        self.calls.fused[name, backend] += 1
        return ops.run(name, *args)

    def _verdict(self, case, device, compare, time=None) -> verification.Verdict:
        file = verification.environment(device, self._host_digest)
        verdict = verification.known(case, file)
        measure = self.session.measuring and device.type == "cuda"
        if verdict is None or (measure and time is not None and verdict.equal and verdict.ms is None):
            with self._pause():
                verdict = verification.settle(case, file, compare, time if measure else None)
        return verdict

"""A stand-in for the allocation graph of newer cores, on the CPU: it knows which tensor may live where, and says which one does not.

Newer cores open a root scope around the whole model forward (its wrappers included) and one scope per block. A tensor made in a block must
be gone when the block ends; a tensor of the root scope must not lose its last reference inside a block; what is made in a pause belongs to
nobody, and nothing that belongs to a scope may be freed in a pause. Breaking a rule kills the process there; here it fails the test.
"""

import contextlib
import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def alive() -> dict[int, StorageWeakRef]:
    """Every storage that a Python tensor holds, by address of the storage object."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage._cdata] = StorageWeakRef(storage)
    return storages


class Scopes:
    """Install with :meth:`install`. ``faults`` collects what broke a rule; ``blocks``, ``pauses`` and ``forwards`` count."""

    def __init__(self):
        self.faults: list[str] = []
        self.blocks = self.pauses = self.forwards = 0
        self.outside: list[StorageWeakRef] = []
        self._block = None
        self._paused = False

    def install(self, monkeypatch):
        import comfy.cli_args
        import comfy.ldm.minimax.model as model
        import comfy.model_prefetch as prefetch

        monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
        monkeypatch.setattr(prefetch, "pause_malloc_graph", self.pause, raising=False)
        monkeypatch.setattr(prefetch, "make_prefetch_queue", lambda *a, **k: [])
        monkeypatch.setattr(prefetch, "prefetch_queue_pop", self.next_block)
        forward = model.MiniMaxH3Model.forward

        def watched(module, *args, **kwargs):
            return self.root(forward, module, args, kwargs)

        monkeypatch.setattr(model.MiniMaxH3Model, "forward", watched)

    # -- scopes --------------------------------------------------------------------------------------------------------------------

    def root(self, forward, module, args, kwargs):
        """One model forward: besides its results, nothing made in it may be left."""
        self.forwards += 1
        self._block = None  # after an exception the node's end drops the whole graph, open scopes included
        before = alive()
        out = forward(module, *args, **kwargs)
        assert self._block is None, "the last block was not closed"
        results = {t.untyped_storage()._cdata for t in out}
        kept = [key for key in alive() if key not in before and key not in results and not self._is_outside(key)]
        if kept:
            self.faults.append(f"forward {self.forwards}: {len(kept)} tensor(s) are left: {self._describe(kept)}")
        return out

    def next_block(self, queue, device, module, **kwargs):
        if self._block is not None:
            self._close_block()
        if module is not None:
            self.blocks += 1
            self._block = alive()

    def _close_block(self):
        before, self._block = self._block, None
        now = alive()
        lost = [key for key, ref in before.items() if ref.expired() and not self._is_outside(key)]
        kept = [key for key in now if key not in before and not self._is_outside(key)]
        if lost:
            self.faults.append(f"block {self.blocks}: {len(lost)} tensor(s) of the scope around it were freed inside")
        if kept:
            self.faults.append(f"block {self.blocks}: {len(kept)} tensor(s) made in it are still alive: {self._describe(kept)}")

    def _is_outside(self, key) -> bool:
        return any(ref.cdata == key for ref in self.outside)

    @staticmethod
    def _describe(keys):
        shapes = [
            f"{list(t.shape)} {t.dtype}" for t in gc.get_objects()
            if type(t) in (torch.Tensor, torch.nn.Parameter) and t.untyped_storage()._cdata in keys]
        return ", ".join(shapes)

    @contextlib.contextmanager
    def pause(self):
        assert not self._paused, "pauses do not nest: leaving the inner one resumes the recording"
        self.pauses += 1
        self._paused = True
        before = alive()
        try:
            yield
        finally:
            self._paused = False
            now = alive()
            lost = [key for key, ref in before.items() if ref.expired() and not self._is_outside(key)]
            if lost:
                self.faults.append(f"pause {self.pauses}: {len(lost)} tensor(s) of a scope were freed in it")
            self.outside += [ref for key, ref in now.items() if key not in before]

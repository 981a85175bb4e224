"""Lets ``import torchvision`` succeed when its C++ half cannot load, as with a CUDA wheel beside a CPU torch.

torchvision tolerates a missing ``_C`` library except in ``_meta_registrations``, which registers fake kernels for
``torchvision::nms`` and ``torchvision::qnms`` and so needs their schemas. ComfyUI imports torchvision but never calls
these operators for H3. The hook defines the two schemas just before torchvision's own import; with a working C++ half
it does nothing. It costs one attribute test per import until torchvision is first imported, and imports torch never.

``run.py setup`` copies this file, with a ``.pth`` line that calls :func:`install`, into the pack's own ``.venv``.
No other Python is touched.
"""

import importlib.abc
import importlib.util
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_TARGET = "torchvision._meta_registrations"
_libraries = []  # a torch.library.Library takes its definitions with it when it is collected


class _SchemaLoader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        # torchvision/__init__ imports .extension (which tries to load _C) before this module.
        if not sys.modules["torchvision.extension"]._has_ops():
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)
        self._loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _SchemaLoader(spec.loader)
        return spec


def install():
    """Put the hook on ``sys.meta_path`` once; harmless when torchvision is absent, whole, or already imported."""
    if _TARGET not in sys.modules and not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())

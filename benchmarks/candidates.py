"""What is compared with stock ComfyUI: each candidate makes a patcher from the stock one."""


def stock(patcher, options):
    return patcher


def exact(patcher, options):
    """H3 Accelerate on a clone of ``patcher``, with the node's own defaults unless ``options`` says otherwise."""
    from ..kernels.patch.comfyui import accelerate

    return accelerate(patcher, **options)


def exact_report(patcher):
    from ..kernels.patch.comfyui import report

    return report(patcher)


CANDIDATES = {"stock": stock, "exact": exact}
# What a candidate says about its last run: a JSON-ready dict.
REPORTS = {"exact": exact_report}


def make(name, patcher, options=None):
    """The patcher of candidate ``name``. Raises ValueError for an unknown name."""
    if name not in CANDIDATES:
        raise ValueError(f"unknown candidate {name!r}: use {', '.join(CANDIDATES)}")
    return CANDIDATES[name](patcher, options or {})


def report(name, patcher):
    """The candidate's own account of what ran, or None when it gives none."""
    return REPORTS[name](patcher) if name in REPORTS else None

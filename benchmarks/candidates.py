"""What is compared with stock ComfyUI: each candidate makes a patcher from the stock one."""


def stock(patcher, options):
    return patcher


def exact(patcher, options):
    """H3 Accelerate on a clone of ``patcher``, with the node's own defaults unless ``options`` says otherwise.

    ``options``: keywords of ``accelerate``; ``features`` may be a dict of switches, ``{"rope": false}``.
    """
    from ..kernels.patch.comfyui import Features, accelerate

    if isinstance(options.get("features"), dict):
        options = {**options, "features": Features(**options["features"])}
    return accelerate(patcher, **options)


def fastest(patcher, options):
    """Nothing fused, the fastest dense attention: what the choice of attention alone is worth."""
    off = {"norm": False, "gate": False, "rope": False, "swiglu": False, "v_view": False, "nvfp4": False, "int8": False}
    return exact(patcher, {**options, "features": off, "attention": "fastest dense"})


def exact_fastest(patcher, options):
    """The exact fusions under the fastest dense attention."""
    return exact(patcher, {**options, "attention": "fastest dense"})


def exact_report(patcher):
    from ..kernels.patch.comfyui import report

    return report(patcher)


CANDIDATES = {"stock": stock, "exact": exact, "fastest": fastest, "exact_fastest": exact_fastest}
# Candidates that promise stock's bytes; the others run another attention and are only timed.
KEEPS_BYTES = ("stock", "exact")
# What a candidate says about its last run: a JSON-ready dict.
REPORTS = dict.fromkeys(("exact", "fastest", "exact_fastest"), exact_report)


def make(name, patcher, options=None):
    """The patcher of candidate ``name``. Raises ValueError for an unknown name."""
    if name not in CANDIDATES:
        raise ValueError(f"unknown candidate {name!r}: use {', '.join(CANDIDATES)}")
    return CANDIDATES[name](patcher, options or {})


def report(name, patcher):
    """The candidate's own account of what ran, or None when it gives none."""
    return REPORTS[name](patcher) if name in REPORTS else None


def dispatch(account):
    """``{"fused": calls, "stock": calls, "why_stock": {"op: reason": calls}}`` of a report, or None without one.

    Equal bytes prove nothing when stock ran everywhere, so every row says how much of it did not.
    """
    if account is None:
        return None
    calls = {"fused": 0, "stock": 0, "why_stock": {}}
    for op, table in account.get("ops", {}).items():
        calls["fused"] += sum(table["fused"].values())
        calls["stock"] += sum(table["stock"].values())
        calls["why_stock"] |= {f"{op}: {reason}": count for reason, count in table["stock"].items()}
    if account.get("stepped_aside"):
        calls["why_stock"]["everything"] = account["stepped_aside"]
    return calls


def stood_by(row):
    """Whether a measured row of a candidate that keeps an account did nothing: all of it was stock."""
    return row.get("dispatch") is not None and row["dispatch"]["fused"] == 0


def idle(rows, device):
    """The rows in which a candidate that fuses fused nothing, on a GPU: there stock was measured twice. A CPU fuses nothing."""
    return [row for row in rows if device.type == "cuda" and row["candidate"] != "fastest" and stood_by(row)]

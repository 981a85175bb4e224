"""Every backend by name, in the order the node lists them."""

from . import flash, kitchen, sage, sdpa
from .backend import Backend
from .sliced import HeadSliced

STOCK, FASTEST = "stock (exact)", "fastest dense"
_PREFIX = "head_sliced:"
BACKENDS: dict[str, Backend] = {b.name: b for b in (*sdpa.BACKENDS, kitchen.INT8, *sage.BACKENDS, *flash.BACKENDS, kitchen.SOL)}
# Offered sliced: those with a workspace of the size of q, k and v
SLICED = tuple(_PREFIX + name for name in ("kitchen_int8", "sage2", "sage3"))
CHOICES = (STOCK, FASTEST, *BACKENDS, *SLICED)


def backend(name: str) -> Backend:
    """The backend called ``name``, or ``head_sliced:NAME``. Raises ValueError with the names there are."""
    if name.removeprefix(_PREFIX) not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; there are {', '.join((*BACKENDS, _PREFIX + 'NAME'))}")
    found = BACKENDS[name.removeprefix(_PREFIX)]
    return HeadSliced(found) if name.startswith(_PREFIX) else found


def automatic() -> list[Backend]:
    """What ``fastest dense`` measures: dense, and not known to be wrong."""
    return [backend for backend in BACKENDS.values() if backend.automatic]

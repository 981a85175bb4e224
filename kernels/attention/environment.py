"""What a backend may ask about the machine: GPU, versions and optional packages.

Everything a probe reads goes through one :class:`Environment`, so that a test can describe any GPU and any set of installed packages.
"""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..nvrtc import driver_version


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Environment:
    """One device and the software around it.

    Args:
        device: where the attention runs.
        capability: CUDA compute capability, None when the device is not CUDA (ROCm: whatever torch reports; see ``hip``).
        gpu, driver, cuda, hip, torch_version: names and versions as torch and NVML report them.
        python: ``sys.version_info[:2]``. platform: ``sys.platform``.
        importer: imports a module by name; raises when it cannot.
        version: version of an installed distribution by name, or None.
    """

    device: torch.device
    capability: tuple[int, int] | None = None
    gpu: str = "none"
    driver: str = "unknown"
    cuda: str | None = None
    hip: str | None = None
    torch_version: str = str(torch.__version__)
    python: tuple[int, int] = sys.version_info[:2]
    platform: str = sys.platform
    importer: Callable[[str], object] = importlib.import_module
    version: Callable[[str], str | None] = distribution_version
    _modules: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, device: torch.device) -> "Environment":
        """The environment of ``device``; the same object for the same device as long as the process lives."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return _environment(device)

    def module(self, name: str) -> tuple[object | None, str]:
        """``(module, "")`` or ``(None, why not)``. A package that fails to import in any way counts as missing."""
        if name not in self._modules:
            try:
                self._modules[name] = (self.importer(name), "")
            except ModuleNotFoundError as error:
                missing = f"{name} is not installed" if error.name in (None, name, name.split(".")[0]) else f"{name} needs {error.name}"
                self._modules[name] = (None, missing)
            # A broken wheel raises what it likes (OSError from a DLL, RuntimeError from a version check); the reason is kept and shown.
            except Exception as error:
                self._modules[name] = (None, f"{name} cannot be imported: {type(error).__name__}: {error}")
        return self._modules[name]

    @property
    def nvidia(self) -> bool:
        return self.device.type == "cuda" and self.hip is None


@functools.cache
def _environment(device: torch.device) -> Environment:
    if device.type != "cuda":
        return Environment(device)
    properties = torch.cuda.get_device_properties(device)
    return Environment(
        device,
        capability=(properties.major, properties.minor),
        gpu=properties.name,
        driver=driver_version() if torch.version.hip is None else "unknown",
        cuda=torch.version.cuda,
        hip=torch.version.hip,
    )

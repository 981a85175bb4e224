"""Which SageAttention build fits this machine, said so that it can be copied into a shell.

Windows wheels: the releases of ``woct0rdho/SageAttention``, named by CUDA major version and torch. Linux: upstream publishes source
only; its ``setup.py`` names the toolkit each GPU needs.
"""

from .environment import Environment

_RELEASES = "https://github.com/woct0rdho/SageAttention/releases"
# (lowest torch, wheel tag after "torch", release, Python tag), newest first
_WINDOWS = (
    ((2, 10), "2.10.0andhigher.post6", "v2.2.0-windows.post6", "cp310"),
    ((2, 9), "2.9.1.post6", "v2.2.0-windows.post6", "cp310"),
    ((2, 8), "2.8.0.post3", "v2.2.0-windows.post3", "cp39"),
)
_TOOLKIT = {(8, 9): "12.4", (9, 0): "12.3", (12, 0): "12.8", (12, 1): "12.8"}
INSTEAD = "kitchen_int8 needs no extra package."


def _pair(version: str) -> tuple[int, int]:
    major, minor = (version.split("+")[0].split(".") + ["0"])[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def windows_wheel(env: Environment) -> str | None:
    """Download address of the wheel for this torch and CUDA, or None when there is none."""
    if env.cuda is None or _pair(env.cuda) < (12, 8):
        return None
    tag = "cu130" if _pair(env.cuda)[0] >= 13 else "cu128"
    for lowest, torch_tag, release, python in _WINDOWS:
        if _pair(env.torch_version) >= lowest:
            if tag == "cu130" and lowest < (2, 9):
                return None
            return f"{_RELEASES}/download/{release}/sageattention-2.2.0+{tag}torch{torch_tag}-{python}-abi3-win_amd64.whl"
    return None


def advice(env: Environment) -> str:
    """How to get SageAttention 2.2 for this torch, CUDA, Python and GPU. One paragraph, no line breaks."""
    here = f"torch {env.torch_version}, CUDA {env.cuda}, Python {env.python[0]}.{env.python[1]}"
    if env.platform == "win32":
        wheel = windows_wheel(env)
        if wheel is None:
            return f"There is no prebuilt wheel for {here}; see {_RELEASES}. {INSTEAD}"
        return f"For {here}: python -m pip install -U triton-windows, then python -m pip install {wheel} . {INSTEAD}"
    if env.capability is None or env.cuda is None:
        return INSTEAD
    needed = max(_pair(_TOOLKIT.get(env.capability, "12.0")), _pair(env.cuda))
    arch = f"{env.capability[0]}.{env.capability[1]}"
    return (
        f"For {here} it is built from source with a C++ compiler and the CUDA toolkit {needed[0]}.{needed[1]} (nvcc): "
        f'TORCH_CUDA_ARCH_LIST="{arch}" python -m pip install --no-build-isolation '
        f"git+https://github.com/thu-ml/SageAttention@v2.2.0 . {INSTEAD}"
    )

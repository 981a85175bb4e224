"""Record kitchen's CUDA bytes for ``tests/unit/test_int8_recorded.py``: ``python tests/gpu/make_int8_fixtures.py FILE.safetensors``.

A few rows of each INT8 data set through the stock chains on the GPU at hand. To be repeated only if the contract changes.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
WIDTH, PER_SET, EPS = 512, 3, 1e-5


def load_pack():
    if "h3_vortex" not in sys.modules:
        spec = importlib.util.spec_from_file_location("h3_vortex", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
        sys.modules["h3_vortex"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["h3_vortex"])


def record(device):
    """``{name: tensor}`` on the CPU: inputs, modulated rows and stock's codes and scales."""
    from h3_vortex.kernels import norm_modulate_int8, quantize_rotate_int8, stock, swiglu_int8
    from h3_vortex.tests.gpu import int8_data

    torch.manual_seed(0)

    def rows(columns):
        return torch.cat([int8_data.draw(name)((PER_SET, columns), device).to(torch.bfloat16) for name in int8_data.EVERY])

    out = {"rotate.x": rows(WIDTH), "swiglu.gate_up": rows(2 * WIDTH)}
    out["rotate.q"], out["rotate.scale"] = quantize_rotate_int8.stock(out["rotate.x"])
    out["swiglu.q"], out["swiglu.scale"] = swiglu_int8.stock(out["swiglu.gate_up"])
    # gates on which the chip's exponential and division are exact: 0, from 18 up, from -88 down
    gate = torch.randint(-3, 4, (24, WIDTH), device=device).float()
    gate = torch.where(gate > 0, gate + 18, torch.where(gate < -1, gate - 88, torch.zeros_like(gate)))
    out["saturated.gate_up"] = torch.cat([gate, torch.randn(24, WIDTH, device=device)], dim=1).to(torch.bfloat16)
    out["saturated.q"], out["saturated.scale"] = swiglu_int8.stock(out["saturated.gate_up"])

    x, other, weight = rows(WIDTH), rows(WIDTH), int8_data.weight("normal", WIDTH, device)
    shift, scale, gate = (table.contiguous() for table in stock.tables(WIDTH, device, torch.float32, 3))
    tokens = x.shape[0]
    segments = [(0, 7, 1), (7, 20, 5), (20, tokens, 0)]
    out |= {"norm.x": x.clone(), "norm.other": other, "norm.weight": weight, "norm.shift": shift, "norm.scale": scale, "norm.gate": gate,
            "norm.segments": torch.tensor(segments)}
    out["norm.h"] = stock.norm_modulate(x, weight, shift, scale, segments, EPS)
    out["norm.q"], out["norm.row_scale"] = norm_modulate_int8.stock(x, weight, shift, scale, segments, EPS)
    out["gated.q"], out["gated.row_scale"] = norm_modulate_int8.stock_gated(x, other, gate, weight, shift, scale, segments, EPS)
    out["gated.x"] = x
    out["gated.h"] = stock.norm_modulate(x, weight, shift, scale, segments, EPS)
    return {name: tensor.cpu().contiguous() for name, tensor in out.items()}


def main(path):
    from safetensors.torch import save_file

    load_pack()
    device = torch.device("cuda", torch.cuda.current_device())
    origin = {
        "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "comfy_kitchen": importlib.metadata.version("comfy-kitchen"),
    }
    save_file(record(device), path, metadata=origin)
    print(path, Path(path).stat().st_size, "bytes", origin)


if __name__ == "__main__":
    main(sys.argv[1])

"""What MiniMax H3 is, in plain torch: size and frame grids, checkpoints, samplers. Nothing here imports ComfyUI."""

VERSION = "0.1.0"

"""Where the ops meet a host's H3 model: ComfyUI (:mod:`.comfyui`). Importing this package imports no host."""

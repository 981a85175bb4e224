"""Where the ops meet a host's H3 model: ComfyUI (:mod:`.comfyui`), diffusers (:mod:`.diffusers`). Importing this imports no host."""

"""Where the ops meet a host's H3 model: ComfyUI (:mod:`.comfyui`) and diffusers (:mod:`.diffusers`). Importing this package imports no host."""

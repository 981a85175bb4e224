"""A ComfyUI folder that differs from the one at hand as the newest cores (0.35 to 0.38) do, where this pack meets them.

Made of links to the folder at hand and a few rewritten files: block and attention signatures, ``attention=`` and ``layout`` in the
replacement's arguments, a checkpoint-declared attention, no copy of v, the compiler's flag and pause. Each rewrite is one line for one
line and fails loudly when the folder at hand has changed underneath.
"""

from pathlib import Path

MODEL = "comfy/ldm/minimax/model.py"
ATTENTION = "comfy/ldm/modules/attention.py"
PREFETCH = "comfy/model_prefetch.py"

DECLARED = '''
class ComfyAttention(nn.Module):
    """Stand-in: ``function`` is what a checkpoint declared, None for nothing."""

    def __init__(self):
        super().__init__()
        self.function = None

'''

PAUSE = '''
import contextlib

args.disable_comfy_compiler = getattr(args, "disable_comfy_compiler", False)


@contextlib.contextmanager
def pause_malloc_graph(sync=False):
    yield

'''

# file -> ((what is there, what the newest cores have), ...)
CHANGES = {
    MODEL: (
        ("import AttentionTensorContainer, optimized_attention", "import AttentionTensorContainer, ComfyAttention, optimized_attention"),
        ("        self.heads = heads\n        self.head_dim = head_dim\n        inner",
         "        self.comfy_attention = ComfyAttention()\n        self.heads = heads\n        self.head_dim = head_dim\n        inner"),
        ("        v = v.clone()\n", ""),
        ("optimized_attention(q, k, v, self.heads, mask=None", "optimized_attention(q, k, v, self.heads, preferred_attention="
         "self.comfy_attention, mask=None"),
        ("def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options={}):\n",
         "def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options={}, attention=None):\n"
         "        attention = self.attn if attention is None else attention\n"),
        ("_mod_gate(x, gate_msa, self.attn(h,", "_mod_gate(x, gate_msa, attention(h,"),
        ('args["rope_freqs"],\n                                         transformer_options=args["transformer_options"])}',
         'args["rope_freqs"],\n                                         transformer_options=args["transformer_options"], '
         'attention=args.get("attention"))}'),
        ('"rope_freqs": rope_freqs,\n                     "transformer_options": transformer_options}',
         '"rope_freqs": rope_freqs,\n                     "transformer_options": transformer_options, "layout": layout}'),
        ("        for i, block in enumerate(self.blocks):\n",
         '        for i, block in enumerate(self.blocks):\n            transformer_options["block_index"] = i\n'),
    ),
    ATTENTION: (
        ("class AttentionTensorContainer:", DECLARED.lstrip() + "\nclass AttentionTensorContainer:"),
        ("    def wrapper(*args, **kwargs):\n        containers = None\n",
         "    def wrapper(*args, **kwargs):\n        preferred = kwargs.pop(\"preferred_attention\", None)\n        containers = None\n"),
        ("            if containers is not None:\n                if wrapper.container_function",
         "            if remove_attn_wrapper_key and preferred is not None and preferred.function is not None:\n"
         "                return preferred.function(*args, **kwargs)\n"
         "            if containers is not None:\n                if wrapper.container_function"),
    ),
    PREFETCH: (("PREFETCH_QUEUES = []\nGRAPH_MODULES", PAUSE.lstrip() + "\nPREFETCH_QUEUES = []\nGRAPH_MODULES"),),
}


def build(tree: Path, target: Path) -> Path:
    """``target``, made of links into ``tree`` and the rewritten files."""
    tree, target = Path(tree).resolve(), Path(target)
    _link(tree, target, {Path(name).parts for name in CHANGES})
    for name, changes in CHANGES.items():
        text = (tree / name).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
            text = text.replace(old, new)
        (target / name).write_text(text, encoding="utf-8")
    return target


def _link(source: Path, target: Path, own: set) -> None:
    target.mkdir()
    inside = {parts[0]: {rest[1:] for rest in own if rest[0] == parts[0]} for parts in own}
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        if entry.name not in inside:
            (target / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
        elif entry.is_dir():
            _link(entry, target / entry.name, inside[entry.name])

"""From one description of a graph to both of ComfyUI's formats: the canvas (UI, 0.4) and the queue (API).

A server's ``/object_info`` gives the order and the types of every node's inputs, so nothing of them is repeated here.
Standard library only; not part of the installed pack.
"""

import re
import uuid
from dataclasses import dataclass, field

CORE_VERSION = "0.33.0"
GAP, GROUP_PAD, GROUP_HEAD = 40, 20, 50
NODE_WIDTH, NOTE_WIDTH, SLOT, WIDGET, TITLE = 400, 460, 20, 24, 30
# Heights of a text of many lines, and of the picture or film that a node shows.
PROMPT = 160
SHOWS = {"LoadImage": 260, "LoadVideo": 300, "LoadAudio": 90, "SaveVideo": 400, "PreviewAny": 100}
REPORTS = 150  # room for the text that this pack's nodes show after a run
GROUP_COLORS = ("#3f789e", "#8A8", "#a1309b", "#b58b2a", "#3f789e")


@dataclass(frozen=True)
class Link:
    """Output number ``slot`` of the node with this key."""

    key: str
    slot: int = 0


@dataclass
class Node:
    """``inputs``: name -> value or :class:`Link`; inputs not named keep the node's default. ``models``: for the missing-model dialog."""

    type: str
    inputs: dict = field(default_factory=dict)
    title: str | None = None
    models: tuple = ()
    height: int | None = None
    width: int = NODE_WIDTH


@dataclass
class Workflow:
    """``nodes``: key -> :class:`Node`, in the order of their ids.

    ``columns``: from left to right; a column is groups from top to bottom, a group (title, stacks), its stacks from left to right, a stack
    the keys of its nodes from top to bottom.
    """

    name: str
    nodes: dict
    columns: list
    note: str
    models_note: str


def to_api(workflow, object_info):
    """The graph as ``POST /prompt`` takes it: every widget stated, as the canvas exports it."""
    ids = _ids(workflow)
    graph = {}
    for key, node in workflow.nodes.items():
        inputs = {}
        for name, spec in _inputs(node, object_info):
            if name in node.inputs and isinstance(node.inputs[name], Link):
                link = node.inputs[name]
                inputs[name] = [ids[link.key], link.slot]
            elif _is_widget(spec):
                inputs[name] = _value(node, name, spec)
        unknown = set(node.inputs) - set(inputs)
        if unknown:
            raise ValueError(f"{workflow.name}: {node.type} ({key}) has no input {', '.join(sorted(unknown))}")
        graph[ids[key]] = {"inputs": inputs, "class_type": node.type, "_meta": {"title": _title(node, object_info)}}
    return graph


def to_canvas(workflow, object_info):
    """The graph as the canvas saves it, with groups, notes and places."""
    ids = _ids(workflow)
    boxes, groups = _place(workflow, object_info)
    links, nodes = [], {}
    for order, (key, node) in enumerate(workflow.nodes.items()):
        nodes[key] = _canvas_node(node, int(ids[key]), order, boxes[key], object_info)
    for key, node in workflow.nodes.items():
        for slot, entry in enumerate(nodes[key]["inputs"]):
            link = node.inputs.get(entry["name"])
            if isinstance(link, Link):
                output = nodes[link.key]["outputs"][link.slot]
                links.append([len(links) + 1, int(ids[link.key]), link.slot, int(ids[key]), slot, output["type"]])
                entry["link"] = links[-1][0]
                output["links"] = [*(output["links"] or []), links[-1][0]]
    first_note = len(nodes) + 1
    notes = _notes(workflow, first_note)
    return {
        "id": _uuid(workflow.name),
        "revision": 0,
        "last_node_id": len(nodes) + len(notes),
        "last_link_id": len(links),
        "nodes": [*notes, *nodes.values()],
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {"ds": {"scale": 0.7, "offset": [NOTE_WIDTH + 120, 120]}},
        "version": 0.4,
    }


def _uuid(name):
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"h3-vortex/workflows/{name}"))


def _ids(workflow):
    return {key: str(number) for number, key in enumerate(workflow.nodes, 1)}


def _title(node, object_info):
    return node.title or object_info[node.type]["display_name"] or node.type


def _inputs(node, object_info):
    """(name, spec) of every input in the order of the node's definition, growing inputs as many as are linked."""
    declared = object_info[node.type]["input"]
    for name, spec in [*declared.get("required", {}).items(), *declared.get("optional", {}).items()]:
        if spec[0] == "COMFY_AUTOGROW_V3":
            template = spec[1]["template"]
            (inner,) = next(iter(template["input"].values())).values()
            linked = sum(given.startswith(name + ".") for given in node.inputs)
            for number in range(linked):
                yield f"{name}.{template['prefix']}{number}", (inner[0], {"optional": True})
        else:
            yield name, spec


def _is_widget(spec):
    return isinstance(spec[0], list) or spec[0] in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")


def _value(node, name, spec):
    if name in node.inputs:
        return node.inputs[name]
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    if "default" in options:
        return options["default"]
    if isinstance(kind, list):
        return kind[0]
    if kind == "COMBO":
        return options["options"][0]
    if kind == "COMFY_DYNAMICCOMBO_V3":
        return options["options"][0]["key"]
    if kind == "STRING":
        return ""
    raise ValueError(f"{node.type}.{name} has no default: state a value")


def _canvas_node(node, number, order, box, object_info):
    info = object_info[node.type]
    sockets, widgets, values = [], [], []
    optional = set(info["input"].get("optional", {}))
    for name, spec in _inputs(node, object_info):
        kind, options = spec[0], spec[1] if len(spec) > 1 else {}
        entry = {"name": name, "type": "COMBO" if isinstance(kind, list) else kind, "link": None}
        if not _is_widget(spec):
            if name in optional or options.get("optional"):
                entry["shape"] = 7
            if "." in name:
                entry["label"] = name.split(".")[1]
            sockets.append(entry)
            continue
        widgets.append({**entry, "widget": {"name": name}})
        value = node.inputs.get(name)
        values.append(_value(node, name, spec) if not isinstance(value, Link) else options.get("default", ""))
        if options.get("control_after_generate"):
            values.append("randomize")
        if options.get("image_upload"):
            values.append("image")
    properties = {"cnr_id": "h3-vortex"} if node.type.startswith("H3Vortex") else {"cnr_id": "comfy-core", "ver": CORE_VERSION}
    properties["Node name for S&R"] = node.type
    if node.models:
        properties["models"] = [dict(model) for model in node.models]
    outputs = zip(info["output_name"], info["output"], strict=True)
    return {
        "id": number,
        "type": node.type,
        "pos": box[:2],
        "size": box[2:],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": [*sockets, *widgets],
        "outputs": [{"name": name, "type": "COMBO" if isinstance(kind, list) else kind, "links": None} for name, kind in outputs],
        **({"title": node.title} if node.title else {}),
        "properties": properties,
        "widgets_values": values,
    }


def _height(node, object_info):
    if node.height:
        return node.height
    sockets, lines, tall = 0, 0, 0
    for name, spec in _inputs(node, object_info):
        options = spec[1] if len(spec) > 1 else {}
        if not _is_widget(spec):
            sockets += 1
        elif isinstance(node.inputs.get(name), Link):
            lines += 1
        elif options.get("multiline"):
            tall += PROMPT
        else:
            lines += 1 + bool(options.get("control_after_generate")) + bool(options.get("image_upload"))
    sockets = max(sockets, len(object_info[node.type]["output"]))
    shows = SHOWS.get(node.type, REPORTS if node.type.startswith("H3Vortex") else 0)
    return TITLE + sockets * SLOT + lines * WIDGET + tall + shows


def _place(workflow, object_info):
    """{key: [x, y, width, height]} and the groups around them."""
    boxes, groups, x = {}, [], 0
    for column in workflow.columns:
        y, column_width = 0, 0
        for title, stacks in column:
            top, bottom, left = y, y, x + GROUP_PAD
            for stack in stacks:
                y, width = top + GROUP_HEAD, max(workflow.nodes[key].width for key in stack)
                for key in stack:
                    y += TITLE
                    boxes[key] = [left, y, width, _height(workflow.nodes[key], object_info)]
                    y += boxes[key][3] + GAP
                left += width + GAP
                bottom = max(bottom, y)
            width = left - GAP + GROUP_PAD - x
            groups.append({
                "id": len(groups) + 1, "title": title, "bounding": [x, top, width, bottom - GAP + GROUP_PAD - top],
                "color": GROUP_COLORS[len(groups) % len(GROUP_COLORS)], "flags": {},
            })  # fmt: skip
            y, column_width = bottom + GAP, max(column_width, width)
        x += column_width + GAP
    return boxes, groups


def _notes(workflow, first):
    notes, y = [], 40
    for title, text in (("About this workflow", workflow.note), ("Models", workflow.models_note)):
        # Lines wrap at about 70 characters; the address of a link is not shown.
        shown = re.sub(r"\]\(\S+\)", "]", text)
        height = 60 + 19 * sum(1 + len(line) // 70 for line in shown.splitlines())
        notes.append({
            "id": first + len(notes), "type": "MarkdownNote", "pos": [-NOTE_WIDTH - GAP, y], "size": [NOTE_WIDTH, height], "flags": {},
            "order": 0, "mode": 0, "inputs": [], "outputs": [], "title": title, "properties": {}, "widgets_values": [text],
            "color": "#222", "bgcolor": "#000",
        })  # fmt: skip
        y += height + TITLE + GAP
    return notes

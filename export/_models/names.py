"""Names that describe the source of a node, for errors, profiles and viewers, without details of the machine."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any

SCOPES = "pkg.torch.onnx.name_scopes"
_RELSKEW = re.compile(r"relskew/(?:compute|shape)/attention_(\d+)/(.*)")
_COMPILED = re.compile(r"\b_orig_mod\.|\._orig_mod$")  # the parts that ``torch.compile`` adds to the names of modules
_SYMBOL = re.compile(r"\b[su]\d+\b")


def first_free(name: str, taken: Collection[str]) -> str:
    return next(found for found in chain([name], (f"{name}_{number}" for number in count(2))) if found not in taken)


def name_nodes(model: Any, prefix: str) -> None:
    """Name nodes by their module and purpose, and their outputs by the node.

    ``prefix`` is left out of modules' names. torch's notes, which hold paths of the machine's files, are removed.
    """
    import onnx_ir

    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))
    ends = [*model.graph.inputs, *model.graph.outputs]
    stored = list(model.graph.initializers.items())
    made = [value for name, value in stored if not name.startswith(prefix)]
    results = {value.name for value in model.graph.outputs}
    taken = {value.name for value in (*ends, *made)}
    fixed = {id(value) for value in (*ends, *model.graph.initializers.values())}

    def free(name: str) -> str:
        found = first_free(name, taken)
        taken.add(found)
        return found

    for name, value in stored:
        if name.startswith(prefix):
            value.name = free(_COMPILED.sub("", name.removeprefix(prefix)))
    homes = _homes(nodes, prefix)
    calls = [_RELSKEW.fullmatch(node.name or "") for node in nodes]
    in_module: dict[str, set[str]] = defaultdict(set)
    for home, call in zip(homes, calls, strict=True):
        if call:
            in_module[home].add(call[1])
    for node, home, call in zip(nodes, homes, calls, strict=True):
        parts = [home] if home else []
        if call and (not home or len(in_module[home]) > 1):
            parts.append(f"attention_{call[1]}")
        node.name = free("/".join([*parts, call[2] if call else node.op_type]))
        for index, value in enumerate(node.outputs):
            if id(value) not in fixed:
                value.name = node.name if index == 0 else free(f"{node.name}/{index}")
    for value in made:  # constants folded from others
        if value.uses() and value.name not in results:
            value.name = free(f"{value.uses()[0].node.name}/constant")
    for holder in (model, model.graph, *nodes, *_values(model, nodes)):
        holder.metadata_props.clear()


def name_lengths(model: Any, names: Mapping[str, str]) -> None:
    """Replace torch's symbols, and sums of them that have a name, in the shapes of all tensors."""
    import onnx_ir

    def renamed(size: Any) -> int | str | None:
        # equal names mean equal lengths, so an unknown length gets no name
        if isinstance(size, int) or size.value is None:
            return size if isinstance(size, int) else None
        text = _SYMBOL.sub(lambda match: names.get(match[0], match[0]), size.value)
        if "(" not in text:  # torch writes the terms of a sum in either order
            text = " + ".join(sorted(text.split(" + ")))
        return names.get(text, text)

    for value in _values(model, list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([renamed(size) for size in value.shape])


def _homes(nodes: Sequence[Any], prefix: str) -> list[str]:
    """Return the module that made each node; nodes in a loop or branch belong to the module of the loop."""
    inherited: dict[int, str] = {}
    homes = []
    for node in nodes:
        homes.append(inherited.get(id(node.graph)) or _module_of(node, prefix))
        for attribute in node.attributes.values():
            if attribute.type.name == "GRAPH":
                inherited[id(attribute.value)] = homes[-1]
    return homes


def _module_of(node: Any, prefix: str) -> str:
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    path: str = scopes[-2] if len(scopes) > 1 else ""
    return _COMPILED.sub("", path.removeprefix(prefix)) if path.startswith(prefix) else ""


def _values(model: Any, nodes: Sequence[Any]) -> list[Any]:
    made = [value for node in nodes for value in node.outputs]
    return [*model.graph.inputs, *model.graph.initializers.values(), *made]

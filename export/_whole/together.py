"""Graphs that belong together: all of their files appear, or none."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

from relskew_core.export._publish import publish
from relskew_core.export._save import unpublished

SET = "relskew.set"
"""The metadata's key for a text that is the same in files that were written together."""


def write_together(
    graphs: Sequence[onnx.ModelProto],
    targets: Sequence[Path],
    *,
    overwrite: bool,
    external_threshold: int,
    check: Callable[[Sequence[Path]], None] | None,
) -> None:
    """Save graphs that refer to each other; ``check`` is called with the finished files."""
    if len(graphs) > 1:
        digest = hashlib.sha256(b"".join(graph.SerializeToString(deterministic=True) for graph in graphs)).hexdigest()
        for graph in graphs:
            graph.metadata_props.add(key=SET, value=digest)
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(unpublished(graph, target, external_threshold))
            for graph, target in zip(graphs, targets, strict=True)
        ]
        if check is not None:
            check([new for new, _ in files])
        _publish_all(files, targets, overwrite)


def _publish_all(files: Sequence[tuple[Path, Path | None]], targets: Sequence[Path], overwrite: bool) -> None:
    """Give all files their names; if one fails, remove those that replaced nothing."""
    done: list[Path] = []
    try:
        for (new, data), target in zip(files, targets, strict=True):
            names = [target, *([] if data is None else [target.parent / data.name])]
            free = [name for name in names if not os.path.lexists(name)]
            publish(new, data, target, overwrite)
            done += free
    except BaseException:
        for path in done:
            path.unlink(missing_ok=True)
        raise

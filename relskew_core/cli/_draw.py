"""``relskew draw``: the rows of tables, masks and weights, as a file or in the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from relskew_core._positions.span import BEYOND
from relskew_core.cli._console import CliError, output, reason
from relskew_core.cli._options import (
    BlockOptions,
    CallOptions,
    Command,
    Prefix,
    Program,
    Seed,
    SpanOptions,
    Weights,
    sized,
    takes,
)

app = typer.Typer(help="Draw pictures in the terminal, or as SVG or PNG.", cls=Program)
Save = Annotated[Path | None, typer.Option(help="Write an .svg, or a .png, instead of drawing in the terminal.")]
QUERIES = 24


@app.command(cls=Command, epilog="Example: relskew draw span --clip 3")
@takes(SpanOptions)
def span(given: SpanOptions, save: Save = None) -> int:
    """Draw the relative position of each row of a table, and what is used beyond its ends.

    Without --beyond all three ways are drawn.
    """
    from relskew_core.draw import draw_span

    chosen = given.chosen()
    if chosen is None:
        raise CliError("--length N (the longest input) or --clip K (where distances are clipped) must be given")
    same = given.beyond is not None or given.clip is not None
    spans = [chosen] if same else [replace(chosen, beyond=beyond) for beyond in BEYOND]
    return _write_or_show(draw_span(*spans), save)


@app.command(cls=Command, epilog="Example: relskew draw call --queries 8 --causal --window 3,0")
@takes(CallOptions)
def call(
    given: CallOptions,
    queries: Annotated[int, sized("Number of queries.", least=1)] = 12,
    keys: Annotated[
        int | None, sized("Number of keys; those of the cache and the queries by default.", least=1)
    ] = None,
    past: Annotated[int, sized("Number of cached keys before the first query.", least=0)] = 0,
    segments: Annotated[str | None, typer.Option(help="Lengths of packed documents, as in 4,3,5.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="Add an attention sink to the keys.")] = False,
    save: Save = None,
) -> int:
    """Draw which keys each query of a call sees, and at which relative position.

    With --length or --clip: from which row of a table.
    """
    from relskew_core.draw import draw_call

    total = past + queries if keys is None else keys
    labels = None if segments is None else _segments(segments, queries, past, total)
    picture = draw_call(queries, total, given.chosen(), sinks=sinks, **given.pattern(), segments=labels, offset=past)
    return _write_or_show(picture, save)


@app.command(cls=Command, epilog="Example: relskew draw weights --embed-dim 8 --num-heads 2 --length 24 --causal")
@takes(BlockOptions, optional=True)
def weights(
    given: BlockOptions,
    model: Annotated[
        Path | None, typer.Option(help="Take the block from a model that relskew exported, instead of options.")
    ] = None,
    weights: Weights = None,
    prefix: Prefix = "",
    seed: Seed = None,
    source: Annotated[
        Path | None,
        typer.Option("--input", help="The input of the block, (length, width), as .npy; random by default."),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="With --cross: the memory that the block attends to, as .npy; random by default."),
    ] = None,
    queries: Annotated[int, sized("Length of a random input.", least=1, most=1024)] = QUERIES,
    head: Annotated[list[int] | None, typer.Option(help="Only this head; can be repeated.", min=0)] = None,
    save: Save = None,
) -> int:
    """Draw how much each query of a block attends to each key, head by head.

    The block is given by options, or by a model that was exported; its weights by a file or a seed, as for export
    and validate.
    """
    from relskew_core.cli import _layer
    from relskew_core.draw import draw_weights
    from relskew_core.draw._picture import check_cells

    spec, arrays, origin = _layer.block_of(given, model, weights, prefix, seed)
    x, read = _layer.read_input("input", source, spec, queries)
    kept, _ = _layer.read_input("memory", memory, spec, queries) if spec.cross else (None, "")
    if memory is not None and not spec.cross:
        raise CliError("--memory needs a block with --cross")
    try:
        cells = spec.num_heads * len(x) * len(x if kept is None else kept)
        check_cells(cells, "heads times queries times keys")
        drawn = draw_weights(_layer.weights_of(spec, arrays, x, kept), heads=head)
    except ValueError as error:
        raise CliError(reason(error)) from error
    return _write_or_show(replace(drawn, notes=[*drawn.notes, f"Weights: {origin}. Input: {read}."]), save)


def _segments(text: str, queries: int, past: int, keys: int) -> Any:
    import numpy as np

    lengths = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in lengths) or sum(map(int, lengths)) != keys or past + queries > keys:
        raise CliError(f"--segments must be the lengths of documents, {keys} keys in total, got {text!r}")
    of_keys = np.repeat(np.arange(len(lengths), dtype=np.int64), [int(part) for part in lengths])
    return of_keys[past : past + queries], of_keys


def _write_or_show(picture: Any, save: Path | None) -> int:
    if save is None:
        output().print(picture)
        return 0
    try:
        written = picture.save(save)
    except ValueError as error:
        raise CliError(f"--save {save}: the path must end in .svg or .png") from error
    output().print(f"wrote {written}", soft_wrap=True)
    return 0

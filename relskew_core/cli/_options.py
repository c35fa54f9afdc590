"""The options of a call and of a block, declared once for all commands that use them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from relskew_core import BlockSpec, Span
from relskew_core._block.spec import BUCKETS
from relskew_core._positions.span import BEYOND, Beyond
from relskew_core.cli._console import CliError

Given = TypeVar("Given")

Names = list[str] | None
Weights = Annotated[
    Path | None, typer.Option(help="A file with the block's weights: .npz, .safetensors, or a torch .pt.")
]
LARGEST = 2**20
"""The upper limit of lengths, widths and distances on the command line."""


def sized(help_text: str, least: int | None = None, most: int = LARGEST) -> Any:
    """Declare an option that is a size, with a limit: a typing error could use all memory."""
    return typer.Option(help=help_text, min=least, max=most)


Prefix = Annotated[str, typer.Option(help="Load only the weights with this name prefix: one block of a larger model.")]
Seed = Annotated[int | None, typer.Option(help="Random weights from this seed; 0 unless --weights are given.")]


PANELS = {
    "Block": ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "cross", "sinks", "no_bias"),
    "Tables": (
        "length", "clip", "beyond", "rel_values", "shared_table", "rel_bias", "no_rel_keys", "alibi", "t5",
        "num_buckets", "max_distance",
    ),
    "Which keys a query sees": ("causal", "window", "block_size", "blocks_before"),
    "Weights": ("weights", "prefix", "seed", "model"),
    "Graph": (
        "profile", "opset", "dtype", "max_length", "past", "in_place", "mask", "segments", "no_projections",
        "chunk_size", "device", "operator",
    ),
    "Output": ("save", "overwrite", "as_json"),
}  # fmt: skip
"""The panels of options in the help of a command."""


def arranged(parameters: list[Any], *, in_panels: bool = False) -> list[Any]:
    """Put options into panels, and show a flag by its name alone: ``--causal`` and not ``--causal <bool>``."""
    homes = {name: panel for panel, names in PANELS.items() for name in names if in_panels}
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        if parameter.param_type_name == "option":
            parameter.rich_help_panel = homes.get(parameter.name, parameter.rich_help_panel)
    return parameters


class Program(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return arranged(super().get_params(ctx))


class Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        return arranged(parameters, in_panels=any(one.name == "clip" for one in self.params))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions:
    length: Annotated[int | None, sized("The longest input that the tables cover.")] = None
    clip: Annotated[int | None, sized("Clip distances at K; farther keys share the edge row.")] = None
    beyond: Annotated[
        str | None, typer.Option(help="With --length, for keys beyond it: error (the default), clip or zero.")
    ] = None
    causal: Annotated[bool, typer.Option("--causal", help="Queries cannot see later keys.")] = False

    def chosen(self) -> Span | None:
        if self.length is not None and self.clip is not None:
            raise CliError("--length and --clip exclude each other")
        if self.beyond is not None and self.length is None:
            raise CliError("--beyond says what happens beyond --length, which must be given too")
        if self.clip is not None:
            return Span.clipped(self.clip)
        if self.length is None:
            return None
        beyond = _beyond(self.beyond)
        return Span.causal(self.length, beyond) if self.causal else Span.full(self.length, beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions(SpanOptions):
    window: Annotated[str | None, typer.Option(help="LEFT,RIGHT window; leave a side empty for no limit.")] = None
    block_size: Annotated[int | None, sized("Local attention in blocks of this size.")] = None
    blocks_before: Annotated[
        int | None, sized("With --block-size: a query sees its whole block and this many blocks before it.")
    ] = None

    def limits(self) -> tuple[int | None, int | None] | None:
        if self.window is None:
            return None
        sides = [side.strip() for side in self.window.split(",")]
        if len(sides) != 2 or not all(side.isdecimal() or not side for side in sides):
            raise CliError(
                f"--window must be LEFT,RIGHT with whole numbers or nothing for unbounded, got {self.window!r}"
            )
        if any(len(side) > 7 or int(side or 0) > LARGEST for side in sides):
            raise CliError(f"--window must reach {LARGEST} at most, or be empty for no limit, got {self.window!r}")
        left, right = (int(side) if side else None for side in sides)
        return left, right

    def pattern(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("causal", "block_size", "blocks_before")}
        return {**same, "window": self.limits()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions(CallOptions):
    embed_dim: Annotated[int, sized("Width of the inputs and of the output.")]
    num_heads: Annotated[int, sized("Number of query heads.")]
    num_kv_heads: Annotated[int | None, sized("Number of key heads, for grouped queries.")] = None
    head_dim: Annotated[int | None, sized("Width of a head; embed-dim / num-heads by default.")] = None
    cross: Annotated[bool, typer.Option("--cross", help="Keys and values come from a memory.")] = False
    rel_values: Annotated[bool, typer.Option("--rel-values", help="A second table, for the values.")] = False
    shared_table: Annotated[bool, typer.Option("--shared-table", help="One table for all heads.")] = False
    rel_bias: Annotated[
        bool, typer.Option("--rel-bias", help="A learned bias for each head and relative position.")
    ] = False
    alibi: Annotated[
        bool, typer.Option("--alibi", help="ALiBi's bias instead of a table, for inputs of any length.")
    ] = False
    t5: Annotated[
        bool, typer.Option("--t5", help="T5's bias by buckets instead of a table, for inputs of any length.")
    ] = False
    num_buckets: Annotated[int | None, sized("With --t5: its buckets, 32 by default.")] = None
    max_distance: Annotated[int | None, sized("With --t5: where the last bucket begins, 128 by default.")] = None
    sinks: Annotated[bool, typer.Option("--sinks", help="An attention sink: one additional logit per head.")] = False
    no_rel_keys: Annotated[bool, typer.Option("--no-rel-keys", help="No table for the keys.")] = False
    no_bias: Annotated[bool, typer.Option("--no-bias", help="Projections without biases.")] = False

    def spec(self, weights: Mapping[str, Any] | None) -> BlockSpec:
        same = ("num_kv_heads", "head_dim", "cross", "sinks")
        given = {name: getattr(self, name) for name in same}
        given.update(self.pattern(), bias=not self.no_bias)
        sizes = {name: size for name in BUCKETS if (size := getattr(self, name)) is not None}
        if sizes and not self.t5:
            raise CliError("--num-buckets and --max-distance are T5's: they need --t5")
        if self.alibi or self.t5:
            self._refuse_tables()
            make = BlockSpec.alibi if self.alibi else BlockSpec.t5
            return make(self.embed_dim, self.num_heads, **sizes, **given)
        tables = {name: getattr(self, name) for name in ("rel_values", "shared_table", "rel_bias")}
        shape = tuple(getattr((weights or {}).get("rel_k"), "shape", ()))
        span = choose_span(self, int(shape[-2]) if len(shape) > 1 else None)
        return BlockSpec(self.embed_dim, self.num_heads, span, rel_keys=not self.no_rel_keys, **tables, **given)

    def _refuse_tables(self) -> None:
        kind = "--alibi" if self.alibi else "--t5"
        both = ("t5",) if self.alibi else ()
        for name in (*both, "length", "clip", "beyond", "rel_values", "shared_table", "rel_bias", "no_rel_keys"):
            if getattr(self, name) not in (None, False):
                raise CliError(f"--{name.replace('_', '-')} and {kind} exclude each other")


def choose_span(options: CallOptions, rows: int | None) -> Span:
    """Return the span of ``--length`` or ``--clip``, or the one implied by a window, a block size or a table."""
    span = options.chosen()
    if span is not None:
        return span
    if rows is not None:
        if rows % 2 == 0 and not options.causal:
            raise CliError(f"--length or --clip must be given: a table of {rows} rows is not symmetric")
        return Span.causal(rows) if options.causal else Span.full((rows + 1) // 2)
    if options.block_size is not None:
        before = 1 if options.blocks_before is None else options.blocks_before
        return Span((before + 1) * options.block_size - 1, 0 if options.causal else options.block_size - 1)
    left, right = options.limits() or (None, None)
    right = 0 if options.causal else right
    if left is not None and right is not None:
        return Span(left, right)
    raise CliError("--length N (the longest input) or --clip K (where distances are clipped) must be given")


def _beyond(text: str | None) -> Beyond:
    if text not in (None, *BEYOND):
        raise CliError(f"--beyond must be one of {', '.join(BEYOND)}, got {text!r}")
    found: Beyond = text or "error"  # type: ignore[assignment]
    return found


def _maybe(hint: Any) -> Any:
    kind, about = get_args(hint)
    return Annotated[kind | None, about]


def takes(options: type[Given], *, optional: bool = False) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of a class, whose instance is its first argument.

    Those that must be given come first, as people read the help; where something else may say all of it, they are
    ``None`` by default.
    """
    needed = None if optional else inspect.Parameter.empty
    hints = get_type_hints(options, include_extras=True)
    declared = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=needed if one.default is MISSING else one.default,
            annotation=_maybe(hints[one.name]) if optional and one.default is MISSING else hints[one.name],
        )
        for one in sorted(fields(options), key=lambda one: one.default is not MISSING)  # type: ignore[arg-type]
    ]

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(**values: Any) -> int:
            given = options(**{one.name: values.pop(one.name) for one in declared})
            return function(given, **values)

        own = inspect.signature(function, eval_str=True)
        _, *others = (one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values())
        arguments = [one for one in others if any(isinstance(x, ArgumentInfo) for x in get_args(one.annotation))]
        rest = [one for one in others if one not in arguments]
        command.__signature__ = own.replace(parameters=[*arguments, *declared, *rest])  # type: ignore[attr-defined]
        return command

    return decorate

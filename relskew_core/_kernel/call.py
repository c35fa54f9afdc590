"""A call of relative attention, declared once: the caller's arguments, and the operands of the kernels.

Everything else is derived from the fields of these classes: signatures of functions and of torch's operators,
gradients, what a native path does not support, the ONNX translation, the tests' matrix.
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, Self, TypeVar, get_type_hints

from relskew_core._array.checks import check_int, check_real, is_array, refuse_unknown, wraps
from relskew_core._array.precision import autocast
from relskew_core._array.typing import Array, Impl
from relskew_core._kernel import kinds
from relskew_core._kernel.kinds import Kind, LabelKind, TableKind
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility

P = ParamSpec("P")
Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass(eq=False)
class Arguments:
    """The arguments of a call; :func:`relskew_core.relative_attention` documents them."""

    q: Array
    k: Array
    v: Array
    rel_k: Array | None = None
    span: Span | None = None
    _: KW_ONLY
    rel_v: Array | None = None
    rel_bias: Array | None = None
    rel_q: Array | None = None
    key_table: Array | None = None
    offset: int | Sequence[int] | Array | None = None
    positions: tuple[Array, Array] | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    block_size: int | None = None
    blocks_before: int | None = None
    mask: Array | None = None
    segments: Array | tuple[Array, Array] | None = None
    scale: float | Array | None = None
    rel_scale: float | Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout: float = 0.0
    seed: int | Array | None = None
    chunk_size: int | None = None
    impl: Impl = "auto"

    def arrays(self) -> dict[str, Array | None]:
        """Return a dictionary of the arrays that become :class:`Operands` unchanged."""
        return {name: getattr(self, name) for name in DIFFERENTIABLE}

    def autocast(self) -> Self:
        by_head = {name: x for name in BY_HEAD if is_array(x := getattr(self, name))}
        arrays = {**self.arrays(), **by_head}
        cast: dict[str, Any] = autocast(arrays)
        # torch 2.8 does not compile `is` between dicts
        same = all(cast[name] is array for name, array in arrays.items())
        return self if same else replace(self, **cast)


CONSTANTS = tuple(field.name for field in fields(Arguments) if "Array" not in str(field.type))
"""The arguments that are constants of a compiled program: ``jax.jit`` must not trace them."""

GROUPS = {
    "q": "arrays", "offset": "positions", "causal": "which keys a query sees", "scale": "scores",
    "chunk_size": "execution",
}  # fmt: skip
"""The groups of the arguments for the reference, by the first of each."""


class Operands(NamedTuple):
    """The arrays of a call for the kernels, with a heads axis; in ragged batches, tables have an axis for items."""

    q: Annotated[Array, kinds.QUERY]  # (..., H, Lq, D)
    k: Annotated[Array, kinds.KEY]  # (..., Hkv, Lk, D)
    v: Annotated[Array, kinds.KEY]  # (..., Hkv, Lk, Dv)
    rel_k: Annotated[Array | None, kinds.TABLE] = None  # Dr wide; ragged (..., 1 or H, W, Dr)
    rel_v: Annotated[Array | None, kinds.TABLE] = None  # Dv wide; ragged (..., 1 or H, W, Dv)
    rel_bias: Annotated[Array | None, kinds.BIAS] = None  # (1 or H, R); ragged (..., 1 or H, W)
    rel_q: Annotated[Array | None, kinds.QUERY] = None  # (..., H, Lq, Dr), None if it is q
    mask: Annotated[Array | None, kinds.MASK] = None  # at least two axes
    key_table: Annotated[Array | None, kinds.TABLE] = None  # D wide, multiplied by the keys; ragged as rel_k
    axis_tables: Annotated[Array | None, kinds.AXES] = None  # (Σ R, D) or (H, Σ R, D), if the call is on grids
    q_segments: Annotated[Array | None, kinds.QUERY_LABEL] = None  # a query sees the keys of its segment
    k_segments: Annotated[Array | None, kinds.KEY_LABEL] = None
    q_positions: Annotated[Array | None, kinds.QUERY_LABEL] = None  # if positions are `by_value`
    k_positions: Annotated[Array | None, kinds.KEY_LABEL] = None
    seed: Annotated[Array | None, kinds.SEED] = None  # of dropout


KINDS: dict[str, Kind] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Operands, include_extras=True).items()
}


def kind_of_table(name: str) -> TableKind:
    """Return the kind of a table of a call, or of another function."""
    kind = KINDS.get(name, kinds.TABLE)
    assert isinstance(kind, TableKind)
    return kind


def names_of(*wanted: Kind) -> list[str]:
    return [name for name, kind in KINDS.items() if kind in wanted]


BY_QUERY, BY_KEY = names_of(kinds.QUERY), names_of(kinds.KEY)

LABELS = [name for name, kind in KINDS.items() if isinstance(kind, LabelKind)]

TABLES = names_of(kinds.TABLE, kinds.BIAS)
"""The arrays with a row for each relative position, which have a span."""

DIFFERENTIABLE = names_of(kinds.QUERY, kinds.KEY, kinds.TABLE, kinds.BIAS, kinds.MASK)
"""The arrays that have gradients: arguments of the same names."""

LEARNED = (*DIFFERENTIABLE, *names_of(kinds.AXES))
"""All arrays of a kernel that have gradients, in the order of :class:`Operands`."""

BY_HEAD = ("sinks", "scale", "rel_scale")
"""Arguments with a number for each head, which are applied before or after a kernel."""


if TYPE_CHECKING:

    class Gradients(Operands):
        """Gradients by argument."""

        sinks: Array | None = None
        scale: Array | None = None
        rel_scale: Array | None = None

else:
    _names = (*DIFFERENTIABLE, *BY_HEAD)
    Gradients = namedtuple("Gradients", _names, defaults=[None] * len(_names))
    Gradients.__doc__ = "Gradients of relative attention, by argument; ``None`` for absent and boolean ones."


def checked(check: Callable[..., Any], **limits: Any) -> Any:
    """Declare an option that may be ``None``, and the check of the argument of its name."""
    return field(default=None, metadata={"check": functools.partial(check, **limits)})


@dataclass(frozen=True, slots=True)
class Part:
    """The place of this call in a larger one: attention over some of the keys, queries or heads.

    What a seed drops is drawn by the whole's places.
    """

    of_more: bool = False  # more keys: the output will be merged, so it keeps the dtype of the accumulation
    query: int | None = None  # the position of query 0 in the whole sequence, None if it is the offset
    key: int = 0  # the position of key 0
    step: int = 1  # from one position to the next
    head: int = 0  # the index of the first head among all heads
    heads: int | None = None  # the number of all heads, None if all are here


EVERYWHERE = 2**40
"""A distance along a side of a grid beyond all its cells."""


class Side(NamedTuple):
    """One side of the grids of queries and of keys."""

    queries: int
    keys: int
    query_step: int = 1  # the distance of neighbours, in rows of the side's table
    key_step: int = 1
    offset: int = 0  # the place of query 0, with key 0 at place 0
    before: int = EVERYWHERE  # how far back a query sees
    after: int = EVERYWHERE
    shifts: int = 0  # 1 if what a query sees moves into the grid at borders

    @property
    def rows(self) -> int:
        return (self.queries - 1) * self.query_step + (self.keys - 1) * self.key_step + 1

    @property
    def hides(self) -> bool:
        """Whether some queries may not see some keys."""
        return bool(self.before < EVERYWHERE or self.after < EVERYWHERE)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a call that are not arrays. Native paths need not support fields with a default."""

    span: Span
    visibility: Visibility
    scale: float
    rel_scale: float
    softcap: float | None = checked(check_real, positive=True)
    chunk_size: int | None = checked(check_int, minimum=1)
    dropout: float = 0.0  # share of the weights that are dropped
    return_lse: bool = False
    # A factory, because torch.compile wraps the defaults of constructors, and torch 2.11 cannot wrap such an object.
    part: Part = field(default_factory=Part)
    # of grids whose cells are the last queries and keys, row by row; `rel_bias` then has a number for each pair of
    # cells that differ alike, (1 or H, R · R' · …), followed by the three of `prefix_bias` if there are others
    sides: tuple[Side, ...] = ()

    def positions(self) -> tuple[int, int]:
        """Return the lowest and highest visible relative position; ``(0, 0)`` if no key is visible."""
        return self.visibility.positions() or (0, 0)


def shape_of_rows(x: Operands) -> tuple[int, ...]:
    """Return the shape of arrays with one number for each query, such as the log-sum-exp: (..., H, Lq)."""
    return tuple(x.q.shape)[:-1]


def shape_of_sums(x: Operands) -> tuple[int, ...]:
    """Return the shape of the sums of weights, (..., H, Lq, 2)."""
    return (*x.q.shape[:-1], 2)


def shape_of_out(x: Operands) -> tuple[int, ...]:
    """Return the shape of the output, (..., H, Lq, Dv)."""
    return (*x.q.shape[:-1], x.v.shape[-1])


CHECKS: dict[str, Callable[..., Any]] = {
    option.name: option.metadata["check"] for option in fields(Options) if "check" in option.metadata
}
"""The names of the options that are passed on unchanged, with their checks."""


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


_DEFAULTS = {
    kind: {
        option.name: _default(option) for option in fields(kind) if option.compare and _default(option) is not MISSING
    }
    for kind in (Options, Span, Visibility, RaggedVisibility)
}


def named(x: Operands | Gradients) -> dict[str, Any]:
    """Return arrays by their names; torch.compile does not trace ``_asdict`` before torch 2.9."""
    return {name: getattr(x, name) for name in type(x)._fields}


def with_gradients(x: Gradients, **changed: Array | None) -> Gradients:
    """Return gradients with others for the named ones; torch 2.8 does not compile ``_replace``."""
    return Gradients(**{**named(x), **changed})


def has_tables(operands: Operands) -> bool:
    """Whether a call has a table or bias by relative position."""
    return any(getattr(operands, name) is not None for name in TABLES)


def unsupported(operands: Operands, options: Options, supported: frozenset[str]) -> list[str]:
    """Name the given arrays and the options in use that a native path does not support."""
    given = [name for name, x in named(operands).items() if x is not None and name not in supported]
    found = list(dict.fromkeys(name.partition("_")[2] if name in LABELS else name for name in given))
    for part in (options, options.visibility, *((options.span,) if has_tables(operands) else ())):
        for name, default in _DEFAULTS[type(part)].items():
            if name not in supported:
                value = getattr(part, name)
                if value is not default and (is_array(value) or value != default):
                    found.append(name)
    return found


def takes(
    arguments: Callable[P, Given], before: Callable[[Callable[..., Any], Callable[..., Any]], Any] | None = None
) -> Callable[[Callable[..., Result]], Callable[P, Result]]:
    """Give a function that accepts declared arguments their signature.

    ``before`` makes of both what is called instead, and gets the arguments as they are written.
    """
    signature = inspect.signature(arguments)
    known = frozenset(signature.parameters)

    def decorate(function: Callable[..., Result]) -> Callable[P, Result]:
        def made(*args: P.args, **kwargs: P.kwargs) -> Given:
            for keyword in kwargs:
                if keyword not in known:
                    refuse_unknown(function.__name__, keyword, known)
            return arguments(*args, **kwargs)

        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(made(*args, **kwargs))

        if before is not None:
            call = before(function, made)
        call = wraps(function)(call)
        result = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        vars(arguments)["__init__"].__qualname__ = function.__name__  # Python's errors name the function then
        return call

    return decorate

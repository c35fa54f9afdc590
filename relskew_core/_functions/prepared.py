"""Calls that are repeated: checked once for all equal calls, and from then on passed to the kernels directly.

The arithmetic of one token takes some microseconds, and its checks ten times as many. Their results depend only on
types, shapes, dtypes, devices and options, which are therefore the keys of the cache; arrays never are. A call that
differs in any of them from the calls that have passed goes through every check.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from types import NoneType
from typing import Any

from relskew_core import backends
from relskew_core._array.namespace import is_compiling
from relskew_core._array.precision import widened
from relskew_core._array.softmax import log_sum_exp
from relskew_core._array.typing import IMPLS
from relskew_core._kernel.call import DIFFERENTIABLE, KINDS, Arguments, Operands, has_tables
from relskew_core._kernel.grids import is_small
from relskew_core._kernel.problem import Problem
from relskew_core._positions.span import Span
from relskew_core.backends._path import PORTABLE

MOST = 256
"""The most kinds of calls that are remembered; beyond that all are forgotten and checked again."""

PLAIN = frozenset((NoneType, bool, int, float, str))
"""Types of options that cannot hide an array or change."""

Values = tuple[Any, ...]
"""A call as written: positional arguments, keyword arguments, and placeholders for missing ones."""

ABSENT: Values = (None,)
"""An array, an option or an offset."""

Kind = tuple[tuple[Any, ...], Values]
"""The key of equal calls, and the values of one call."""

REQUIRED = {"q", "k", "v"}
DEFAULTS = {field.name: field.default for field in fields(Arguments)}
BY_PLACE = [field.name for field in fields(Arguments) if not field.kw_only]
_alike: dict[tuple[Any, ...], Alike | None] = {}
_checked: dict[Hashable, Checked | OnGrids] = {}


@dataclass(eq=False, slots=True)
class Alike:
    """Facts derived from the names and types of a call's arguments alone; arguments are referred to by index."""

    kernels: Any  # of a library
    arrays: Callable[[Values], Values]  # selects the given arrays
    operands: Callable[[Values], Values]  # selects all possible arrays, with None for missing ones
    options: Callable[[Values], Any]  # makes all other options, except for the span and the offset
    span: int
    offset: int
    window: int | None
    mask: int | None  # its index among the arrays

    @classmethod
    def of(cls, names: Sequence[str], values: Values) -> Alike | None:
        """Return these facts, ``None`` for calls that cannot be prepared."""
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(values) - 1 or not places.keys() >= REQUIRED:
            return None  # not a valid call
        none = len(values) - 1
        types = {name: type(default) for name, default in DEFAULTS.items()}
        types |= {name: type(values[place]) for name, place in places.items()}
        kernels, window, offset, span = (
            backends.prepared(types["q"]), types.pop("window"), types.pop("offset"), types.pop("span"),
        )  # fmt: skip
        if kernels is None or NoneType in (types["k"], types["v"]) or offset not in (int, NoneType):
            return None
        if window not in (tuple, NoneType) or span not in (Span, NoneType):
            return None
        if not kernels.TYPES.issuperset(map(types.pop, DIFFERENTIABLE)) or not PLAIN.issuperset(types.values()):
            return None
        arrays = [name for name in DIFFERENTIABLE if values[places.get(name, none)] is not None]
        others = [place for name, place in places.items() if name not in (*DIFFERENTIABLE, "offset", "span")]
        return cls(
            kernels,
            itemgetter(*map(places.__getitem__, arrays)),
            itemgetter(*(places.get(name, none) if name in DIFFERENTIABLE else none for name in Operands._fields)),
            itemgetter(none, *others),
            places.get("span", none),
            places.get("offset", none),
            places["window"] if window is tuple else None,
            arrays.index("mask") if "mask" in arrays else None,
        )


def first(function: Callable[..., Any], arguments: Callable[..., Arguments]) -> Callable[..., Any]:
    """Make a function try its raw arguments first, before anything is computed from them.

    The function gets the arguments, and what is to be remembered of the call once it has passed every check.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        found = kind_of(args, kwargs)
        if found is not None and (results := attend(*found)) is not None:
            return results
        return function(arguments(*args, **kwargs), found)

    return call


def kind_of(by_place: Values, by_name: Mapping[str, Any]) -> Kind | None:
    """Return the key of equal calls, and the values of this one.

    ``None`` for a call that cannot be prepared. One query may have any number of keys and any position: decoding is
    calls of one kind.
    """
    if is_compiling():
        return None
    values = (*by_place, *by_name.values(), *ABSENT)
    types = (*by_name, *map(type, values))  # types distinguish True from 1
    try:
        alike = _alike[types]
    except KeyError:
        if len(_alike) >= MOST:
            _alike.clear()
        alike = _alike[types] = Alike.of((*BY_PLACE[: len(by_place)], *by_name), values)
    if alike is None or not alike.kernels.ordinary():
        return None
    of_window = None
    if alike.window is not None:
        of_window = tuple(map(type, values[alike.window]))
        if not PLAIN.issuperset(of_window):
            return None
    arrays = alike.arrays(values)
    try:
        shapes: list[Any] = [x.shape for x in arrays]
    except RuntimeError:  # raised by nested tensors
        return None
    offset = values[alike.offset]
    q, k, v, *_ = shapes
    if q[-2:-1] == (1,):
        count = k[-2:-1]
        if v[-2:-1] != count:
            return None
        if alike.mask is not None and shapes[alike.mask][-1:] == count:
            shapes[alike.mask] = (..., *shapes[alike.mask][:-1])
        shapes[1:3] = (k[:-2], k[-1:]) if k == v else (k[:-2], k[-1:], v[:-2], v[-1:])
        # Without an offset, calls with different numbers of queries and keys are only prepared if nothing depends on
        # it.
        offset = None if offset is None and count != q[-2:-1] else 0
    span = values[alike.span]
    rows = None if span is None else (span.left, span.right, span.beyond)  # a Span's hash is slower
    kind = (alike, offset, of_window, rows, alike.options(values), *shapes, *map(alike.kernels.about, arrays))
    return kind, values


def attend(kind: tuple[Any, ...], values: Values) -> Any:
    """Return the results of a call of a known kind, ``None`` if it is unknown or not for the kernels."""
    checked = _checked.get(kind)
    if checked is None:
        return None
    alike: Alike = kind[0]
    return checked.attend(Operands._make(alike.operands(values)), values[alike.offset] or 0)


def remember(kind: Kind, call: Problem, given: Arguments) -> Any:
    """Remember a checked call, and return its results; ``None`` if the kernels do not support it."""
    checked = Checked.of(call, given)
    if checked is None:
        return None
    if len(_checked) >= MOST:
        _checked.clear()
    (alike, *_), values = kind
    _checked[kind[0]] = checked
    return checked.attend(call.operands(half=checked.half), values[alike.offset] or 0, formed=True)


OF_GRIDS = PLAIN | {tuple, list}
"""The types of the options of calls on grids. Those of what they contain show in its ``repr``."""


def kind_on_grids(arrays: Values, tables: Any, options: Values) -> Hashable | None:
    """Return the key of equal calls on grids, ``None`` for a call that cannot be prepared."""
    if is_compiling() or (tables is not None and type(tables) not in (tuple, list)):
        return None
    every = (*arrays, *(tables or ()))
    kernels, types = backends.prepared(type(arrays[0])), tuple(map(type, every))
    if kernels is None or NoneType in types[:3] or not kernels.TYPES.issuperset(types) or not kernels.ordinary():
        return None
    if not OF_GRIDS.issuperset(map(type, options)):
        return None
    given = [x for x in every if x is not None]
    try:
        shapes = [x.shape for x in given]
    except RuntimeError:  # raised by nested tensors
        return None
    return (types, repr(options), *shapes, *map(kernels.about, given))


def attend_on_grids(kind: Hashable, arrays: Values, tables: Any) -> Any:
    checked: Any = _checked.get(kind)
    return None if checked is None else checked.attend(arrays, tables)


def remember_on_grids(kind: Hashable, call: Problem, form: Any, arrays: Values, tables: Any) -> Any:
    kernels, x, mask = backends.prepared(type(arrays[0])), call.given, arrays[-1]
    if x.mask is not None and x.mask.dtype != mask.dtype:  # a weakly typed one
        return None
    if is_small(x, call.options):
        form, call = form.with_matrix(call)
    known = replace(call, given=Operands(None, None, None))
    own = kernels.call_of(call.operands(half=kernels.HALF), call.options)
    if own is None:
        return None
    if len(_checked) >= MOST:
        _checked.clear()
    _checked[kind] = checked = OnGrids(kernels, known, own, form, kernels.HALF or call.dtype == call.wide)
    return checked.attend(arrays, tables)


@dataclass(frozen=True, slots=True)
class OnGrids:
    kernels: Any  # of a library
    problem: Problem  # holds no arrays
    call: Any  # the description for the kernels
    form: Any  # makes the operands
    as_given: bool  # whether the kernels receive them in their dtype

    def attend(self, arrays: Values, tables: Any) -> Any:
        """Return the results of a call of this kind; ``None`` leaves it to the usual path."""
        problem, x = self.problem, self.form.operands(arrays, tables)
        if not self.as_given:
            x = Operands(*widened(x, problem.dtype, xp=problem.xp))
        if not self.kernels.TYPES.issuperset(map(type, x)):  # the arrays were made while JAX traces
            return None
        out, lse = self.kernels.attend(x, self.call)
        if not (self.as_given and problem.heads):
            out, lse = problem.result(out), None if lse is None else problem.result(lse, dtype=problem.wide)
        return out if lse is None else (out, lse)


@dataclass(frozen=True, slots=True)
class Checked:
    """The remembered facts about equal calls."""

    kernels: Any  # of a library
    problem: Problem  # holds no arrays
    call: Any  # the description for the kernels, None for the portable ones
    half: bool  # whether half precision is passed on
    as_given: bool  # whether the kernels receive the caller's arrays unchanged
    one_query: bool  # a single query, at any position and with any number of keys
    guessed: int  # rows of a table without a span; 0 if there is none

    @classmethod
    def of(cls, call: Problem, given: Arguments) -> Checked | None:
        """Return these facts for a checked call, ``None`` if the kernels do not support it."""
        if given.impl not in IMPLS or given.seed is not None:
            return None
        kernels, x = backends.prepared(type(call.given.q)), call.given
        if kernels is None:  # JAX is tracing, and a heads axis was added
            return None
        # a weakly typed mask was accepted, but other arrays of its dtype may be rejected
        if x.mask is not None and given.mask is not None and x.mask.dtype != given.mask.dtype:
            return None
        portable = given.impl == "portable"
        half = kernels.HALF and not portable
        operands = call.operands(half=half)
        own = None if portable else kernels.call_of(operands, call.options)
        if own is None and not portable:
            return None
        as_given = all(getattr(given, name) is getattr(operands, name) for name in DIFFERENTIABLE)
        known = replace(call, given=Operands(None, None, None))
        span = call.options.span
        guessed = given.span is None and span.right == 0 and span.rows > 1 and has_tables(x)
        return cls(kernels, known, own, half, as_given, x.q.shape[-2] == 1, span.rows if guessed else 0)

    def attend(self, x: Operands, offset: int, *, formed: bool = False) -> Any:
        """Return the results of a call of this kind; ``None`` leaves it, and its errors, to the usual path.

        The arrays are the caller's, or ``formed`` as the kernels want them.
        """
        problem, call = self.problem, self.call
        options = problem.options
        if self.one_query:
            count = x.k.shape[-2]
            if self.guessed == 2 * count - 1:  # the table may then be a full one
                return None
            if call is None:
                options = replace(options, visibility=replace(options.visibility, n_keys=count, offset=offset))
                try:
                    options.visibility.check_reach("rel_k", options.span)
                except ValueError:
                    return None
            elif (call := call.at(count, offset)) is None:
                return None
        if not (formed or self.as_given):
            own = {name: KINDS[name].form(each, heads=problem.heads, xp=problem.xp)
                   for name in DIFFERENTIABLE if (each := getattr(x, name)) is not None}  # fmt: skip
            x = replace(problem, given=Operands(**own)).operands(half=self.half)
            if not self.kernels.TYPES.issuperset(map(type, x)):  # the arrays were made while JAX traces
                return None
        if call is None:
            out, lse = PORTABLE.attention(x, options, xp=problem.xp)
            lse = log_sum_exp(lse) if options.return_lse else None
        else:
            out, lse = self.kernels.attend(x, call)
        if not self.as_given:
            out, lse = problem.result(out), None if lse is None else problem.result(lse, dtype=problem.wide)
        return out if lse is None else (out, lse)

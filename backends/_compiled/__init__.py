"""Kernels compiled at installation, if there is a compiler: whole calls of every floating dtype on CPUs.

Products, skew, softmax and mixing of a block of queries and keys happen in one core's cache. What they do not serve
stays with the library's own path, as does everything where nothing was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from relskew_core._array.precision import cast, wide
from relskew_core._array.softmax import share_of
from relskew_core._array.typing import Namespace
from relskew_core._kernel.call import (
    KINDS,
    Operands,
    Options,
    has_tables,
    unsupported,
)
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.dropout import hashes
from relskew_core._kernel.grids import places
from relskew_core._kernel.kinds import RowsKind
from relskew_core._kernel.sums import sum_to
from relskew_core._positions.labels import check_reach_of, known_items
from relskew_core.backends._compiled.call import ARRAYS as ARRAYS
from relskew_core.backends._compiled.call import GRADIENTS as GRADIENTS
from relskew_core.backends._compiled.call import INTEGERS as INTEGERS
from relskew_core.backends._compiled.call import OFFSETS, SIDES, has_additive_mask
from relskew_core.backends._compiled.call import Call as Call
from relskew_core.backends._compiled.call import kernels as kernels
from relskew_core.backends._path import OPTIONS

_arrays = attrgetter(*(ARRAYS or Operands._fields), *(name for name in INTEGERS if name in Operands._fields))
ONE_THREAD = (0, 1)
"""The last arguments of a call on one thread."""

NO_HASHES = (None, None)
"""The hashes of a call without dropout."""

DTYPES = ("float16", "float32", "float64")  # and bfloat16
"""The end of the names of supported dtypes in all libraries."""

LONGEST = 2**16
"""The most rows of a table: their products with a block of queries are kept."""

APART = 2**30
"""Integers of queries and keys that are nearer to one another are only shifted."""

SUPPORTED = frozenset(
    (*OPTIONS, *ARRAYS, *INTEGERS, "seed", "by_value", "softcap", "blocks_before", "dropout", "sides")
)
"""The arrays of the kernels, and the options from which their numbers follow; calls with others are not supported."""


class Library(NamedTuple):
    """The differences between array libraries.

    An array is passed as an object with a buffer, or as a DLPack capsule. Where a `BufferError` says so, it is not as
    the kernels need it: rows are not in one piece, or numbers not where a processor wants them.
    """

    xp: Namespace
    buffers: Callable[[Sequence[Any]], Iterable[Any]]  # arrays, or None for missing ones, as the kernels accept them
    in_rows: Callable[[Any], Any]  # an array, or a copy that is contiguous along its last axis
    empty: Callable[..., Any]  # makes an array of a shape and the name of a dtype
    zeros: Callable[..., Any]
    threads: Callable[[], int]
    # the address of a function that runs work on the library's threads, 0 if there is none
    team: Callable[[], int] = int
    shared: int = 2**22  # multiplications from which on another thread pays


def missing() -> str | None:
    """Return why there are no kernels, ``None`` if there are."""
    return "no kernels were compiled at installation" if kernels is None else None


def refusal(x: Operands, options: Options, supported: frozenset[str] = SUPPORTED) -> str | None:
    """Return why a call is not for these kernels, ``None`` if it is; other backends may support more."""
    if (reason := missing()) is not None or serves(x, options, supported):
        return reason
    names = unsupported(x, options, supported)
    subject = f"`{'` and `'.join(names)}`" if names else "such sizes, dtypes, offsets, segments or positions"
    return f"the compiled kernels do not take {subject}"


def serves(x: Operands, options: Options, supported: frozenset[str] = SUPPORTED) -> bool:
    """Whether these kernels support a call."""
    return serves_kind(x, options, supported) and (x.k_positions is None or _reached(x, options))


def serves_kind(x: Operands, options: Options, supported: frozenset[str] = SUPPORTED) -> bool:
    """Whether the kernels support a call, provided that its positions fit 32 bits and its tables reach them."""
    if (
        kernels is None
        or not str(x.q.dtype).endswith(DTYPES)
        or unsupported(x, options, supported)
        or abs(options.visibility.offset) >= OFFSETS
    ):
        return False
    if len(options.sides) > SIDES:
        return False
    if 0 in (*x.q.shape, *x.k.shape, x.v.shape[-1]):
        return False
    by_value = x.k_positions is not None or options.sides
    if not by_value or not has_tables(x):
        return True
    # A query would multiply many rows of a longer table in vain.
    return options.span.rows <= min(1024 + 4 * x.k.shape[-2], LONGEST)


def fit(x: Operands, options: Options) -> bool:
    """Whether any positions fit 32 bits: of long distances, the kernels keep a step that no table reaches over."""
    step = max(options.span.left, options.span.right) + 1
    return bool(step * (x.q.shape[-2] + x.k.shape[-2]) < 2 * APART)


def _reached(x: Operands, options: Options) -> bool:
    """Whether positions fit 32 bits and are within tables with ``beyond="error"``; traced ones are not checked."""
    positions: Any = x.q_positions, x.k_positions
    span, fits = options.span, fit(x, options)
    may_be_short = span.beyond == "error" and has_tables(x)
    if fits and not may_be_short:
        return True
    (first_query, last_query), (first_key, last_key) = ((int(each.min()), int(each.max())) for each in positions)
    fits = fits or max(last_query, last_key) - min(first_query, first_key) < APART
    if not fits or not may_be_short:
        return fits
    lowest, highest = options.positions()
    low, high = max(first_key - last_query, lowest), min(last_key - first_query, highest)
    if low >= -span.left and high <= span.right:
        return True
    try:  # what an item sees may be closer than all positions of all items
        check_reach_of("rel_k", span, options.visibility, positions)
    except ValueError:
        return False
    return all(known_items(each) is not None for each in positions)


def attend(x: Operands, call: Call, out: Any, lse: Any, sums: Any, *, library: Library) -> None:
    """Write the output (B, H, Lq, Dv), and into given arrays the log-sum-exp (B, H, Lq) and the sums (B, H, Lq, 2)."""
    try:
        _attend(x, call, (out, lse, sums), library)
    except BufferError:
        _attend(Operands(*map(library.in_rows, x)), call, (out, lse, sums), library)


def _attend(x: Operands, call: Call, results: tuple[Any, ...], library: Library) -> None:
    drawn = _hashes(x, call.options, library) if call.options.dropout else NO_HASHES
    given, made = _buffers(x, call.options, library), library.buffers(results)
    kernels.attend(*call[:3], *given, *drawn, *made, *_threads(call, library))


def _buffers(x: Operands, options: Options, library: Library) -> Iterable[Any]:
    """Return the arrays of a call as the kernels accept them, with positions for the bias of a grid."""
    buffers = library.buffers(_arrays(x))
    if not options.sides or x.rel_bias is None:
        return buffers
    own = places(options.sides, x.q.shape[-2], x.k.shape[-2], x.rel_bias.shape[-1])
    return *[*buffers][: -len(own)], *own


def _threads(call: Call, library: Library) -> tuple[int, int]:
    """Return the team for a call, and its number of threads: the library's, or new ones if it has none."""
    return ONE_THREAD if call.work <= library.shared else (library.team(), library.threads())


def results(out: Any, sums: Any, compute: Callable[[], tuple[Any, Any]], *, xp: Namespace) -> tuple[Any, Any]:
    """Return the results that the backward pass needs, computed if they are not given.

    Given ``sums`` are taken at their word: of attention over more keys, these have a share.
    """
    if out is None or sums is None:
        own, own_sums = compute()
        if out is None:
            out = own if sums is None else cast(own * share_of(own_sums, sums, xp=xp)[..., None], own.dtype, xp=xp)
        sums = own_sums if sums is None else sums
    return out, sums


def pull_back(
    d_out: Any,
    x: Operands,
    call: Call,
    out: Any,
    sums: Any,
    d_lse: Any,
    *,
    library: Library,
    wanted: Container[str] = GRADIENTS,
) -> dict[str, Any]:
    """Return the gradients of a call's arrays; of those that are not ``wanted``, only the mask's is skipped.

    They have the dtype of the accumulation, as they may have to be added up.

    The outputs and their gradients are (B, H, Lq, Dv), the sums (B, H, Lq, 2), and ``d_lse`` (B, H, Lq).
    """
    learned = has_additive_mask(x) and "mask" in wanted
    try:
        return _pull_back((d_out, out, sums, d_lse), x, call, library, learned)
    except BufferError:
        pass  # its traceback would keep these gradients, which may be as large as a mask, next to new ones
    given = tuple(map(library.in_rows, (d_out, out, sums, d_lse)))
    return _pull_back(given, Operands(*map(library.in_rows, x)), call, library, learned)


def _pull_back(given: tuple[Any, ...], x: Operands, call: Call, library: Library, learned: bool) -> dict[str, Any]:
    buffers, found, dtype = library.buffers, dict[str, Any](), wide(x.q.dtype, xp=library.xp)
    for name in GRADIENTS:
        array = getattr(x, name)
        if array is not None and (name != "mask" or learned):
            make = library.empty if isinstance(KINDS[name], RowsKind) else library.zeros  # the kernels add to these
            found[name] = make(array.shape, dtype=dtype)
    drawn = _hashes(x, call.options, library) if call.options.dropout else NO_HASHES
    arrays, gradients = _buffers(x, call.options, library), buffers([found.get(name) for name in GRADIENTS])
    kernels.pull_back(*call[:3], *arrays, *drawn, *buffers(given), *gradients, *_threads(call, library))
    return found


def of_call(found: dict[str, Any], operands: Operands, *, xp: Namespace) -> dict[str, Any]:
    """Return the gradients of arrays with one batch axis in the shapes and dtypes of the call's arrays.

    Each is taken out of what was found: where they are rounded, there are never twice as many.
    """
    mask, own = found.get("mask"), operands.mask
    # the mask may broadcast along some of the batch axes
    if mask is not None and own is not None and mask.shape[0] > 1:
        mask = mask.reshape((*operands.q.shape[:-3], *mask.shape[1:]))
        found["mask"] = sum_to(mask, own.shape[:-2], xp=xp)
        del mask
    originals = {name: getattr(operands, name) for name in found}
    return {name: cast(found.pop(name).reshape(like.shape), like.dtype, xp=xp) for name, like in originals.items()}


def _hashes(x: Operands, options: Options, library: Library) -> tuple[Any, ...]:
    """Return the hashes of queries and keys for dropout."""
    whole = Chunk(0, x.q.shape[-2], 0, x.k.shape[-2], 0, 0, 0)
    return tuple(library.buffers(hashes(x, options, whole, xp=library.xp)))

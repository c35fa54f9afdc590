"""Kernels compiled at installation, where there was a compiler: whole calls of float32 on CPUs, for NumPy and torch.

Products, skew, softmax and mixing of a block of queries and keys happen in one core's cache. What they do not serve
stays with the library's own path, as does everything where nothing was compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from relskew_core._array.softmax import share_of
from relskew_core._array.typing import Namespace
from relskew_core._kernel.call import Operands, Options, unknown
from relskew_core._kernel.chunk import Chunk
from relskew_core._kernel.dropout import hashes, threshold
from relskew_core._kernel.plan import Plan
from relskew_core.backends import _parallel
from relskew_core.backends._path import COMMON

try:
    kernels: Any = importlib.import_module("relskew_core.backends._compiled._kernels")
except ImportError:
    kernels = None

FAR = 2**40
"""Further than anything is that is seen; offsets beyond it are for others."""

BLOCK = 48
"""Queries of a head that are worked on at once."""

WORK = 2**30
"""Multiplications of one part of a call: some ten milliseconds, after which an interrupt is noticed."""

SHARED = 2**22
"""Multiplications for which it pays to wake another thread: a tenth of a millisecond."""

LANES = 16
"""Numbers of the longest vectors."""

NONE = (None, None)

KNOWN = COMMON | {"softcap", "blocks_before", "dropout", "seed", "key_table"}
"""The arrays and options that the kernels know; whatever else a call has keeps it from them."""


class Library(NamedTuple):
    """What differs from array library to array library.

    An array is lent, its rows in one piece, as an object with a buffer or as (address, sizes, steps, what keeps it).
    """

    xp: Namespace
    lend: Callable[[Any], Any]
    empty: Callable[..., Any]  # of float32 and a shape
    zeros: Callable[..., Any]
    threads: Callable[[], int]
    team: Callable[[], int] = int  # the address of what runs a function on the library's own threads, 0 if nothing does


def serves(x: Operands, options: Options) -> bool:
    """Whether a call of four axes each is one for these kernels, but for its dtype."""
    if kernels is None or unknown(x, options, KNOWN) or abs(options.visibility.offset) >= FAR:
        return False
    return 0 not in (*x.q.shape, *x.k.shape, x.v.shape[-1])


def numbers(x: Operands, options: Options) -> tuple[Any, ...]:
    """Return what the kernels are to know of a call of four axes each beside its arrays."""
    pattern, span = options.visibility, options.span
    before = FAR if pattern.left is None else min(pattern.left, FAR)
    after = FAR if pattern.right is None else min(pattern.right, FAR)
    block, behind = pattern.block_size or 0, pattern.whole_blocks_before
    if block:
        block = min(block, FAR)
        before, after = min(before, (min(behind, FAR // block) + 1) * block - 1), min(after, block - 1)
    items, heads, queries, width = x.q.shape
    _, key_heads, keys, value_width = x.v.shape
    return (
        items, heads, key_heads, queries, keys, width, 0 if x.rel_k is None else x.rel_k.shape[-1], value_width,
        span.left + span.right + 1, span.left, span.beyond == "clip", before, after, block, behind, pattern.offset,
        threshold(options.dropout), options.scale, options.rel_scale, options.softcap or 0.0, 1 - options.dropout,
    )  # fmt: skip


def numbers_of(plan: Plan, n_keys: int) -> tuple[Any, ...]:
    """Return the same for a short call. Those of one query are known but for its place, of which its layout tells."""
    known, (first, end, _, row, _) = plan.numbers, plan.layout
    assert known is not None
    if known[3] > 1:
        return known
    position = first - row + plan.options.span.left
    return (*known[:4], n_keys, *known[5:11], position - first, end - 1 - position, 0, 0, position, *known[16:])


def attend(
    x: Operands, options: Options, out: Any, lse: Any, *, library: Library, call: tuple[Any, ...] | None = None
) -> None:
    """Write the output (B, H, Lq, Dv) and, where there is an array for it, the log-sum-exp (B, H, Lq).

    The ``call`` are its numbers, if they are known.
    """
    lend, drawn = library.lend, _drawn(x, options, library.xp)
    call = call or numbers(x, options)
    given = (
        call, *_lent(x, lend), *(NONE if drawn is None else map(lend, drawn)),
        lend(out), None if lse is None else lend(lse[..., None]),
    )  # fmt: skip
    items, heads, _, queries, *_ = call
    work = _work(call)
    if work <= SHARED:
        kernels.attend(*given, 0, 1, 1, 0, 1)
        return
    workers, most = library.threads(), items * heads * -(-queries // BLOCK)
    together = workers if work <= WORK else 4 * workers
    _run(kernels.attend, given, min(most, max(together, work // WORK)), min(most, together), library)


def results(out: Any, lse: Any, compute: Callable[[], tuple[Any, Any]], *, xp: Namespace) -> tuple[Any, Any]:
    """Return the results that a backward pass goes by, computed where they are not given.

    An ``lse`` is taken at its word: of attention over more keys, these have a share.
    """
    if out is None or lse is None:
        own, own_lse = compute()
        if out is None:
            out = own if lse is None else own * share_of(own_lse, lse, xp=xp)[..., None]
        lse = own_lse if lse is None else lse
    return out, lse


def pull_back(
    d_out: Any,
    x: Operands,
    options: Options,
    out: Any,
    lse: Any,
    d_lse: Any,
    *,
    library: Library,
) -> dict[str, Any]:
    """Return the gradients of a call's arrays by name, but for the mask's.

    The results and their gradients are (B, H, Lq, Dv) and (B, H, Lq).
    """
    lend, drawn = library.lend, _drawn(x, options, library.xp)
    q, k, v, rel_k, rel_v, rel_bias, rel_q, *_ = x
    call = numbers(x, options)
    pairs, work = k.shape[0] * k.shape[1], _work(call)
    sums = 1 if work <= SHARED else min(library.threads(), pairs)
    parts = sums * max(1, min(pairs, work // WORK) // sums)
    tables = {
        "rel_k": rel_k,
        "rel_v": rel_v,
        "rel_bias": None if rel_bias is None else rel_bias[:, None],
        "key_table": x.key_table,
    }
    found = {"q": library.empty(q.shape), "k": library.empty(k.shape), "v": library.empty(v.shape)}
    if rel_q is not None:
        found["rel_q"] = library.empty(rel_q.shape)
    for name, table in tables.items():
        if table is not None:
            found[name] = library.zeros((sums, *(table.shape if table.ndim == 3 else (1, *table.shape))))
    given = (
        call, *_lent(x, lend), *(NONE if drawn is None else map(lend, drawn)),
        lend(d_out), lend(out), lend(lse[..., None]), None if d_lse is None else lend(d_lse[..., None]),
        lend(found["q"]), lend(found["k"]), lend(found["v"]),
        *(lend(found[name]) if name in found else None for name in ("rel_q", *tables)), sums,
    )  # fmt: skip
    _run(kernels.pull_back, given, parts, sums, library)
    for name, table in tables.items():
        if table is not None:
            of_each = found[name]
            found[name] = (of_each[0] if sums == 1 else of_each.sum(0)).reshape(getattr(x, name).shape)
    return found


def _run(kernel: Any, given: tuple[Any, ...], parts: int, together: int, library: Library) -> None:
    """Work on the parts of a call, so many together: on the library's own threads, or on ours if it has none.

    Between them an interrupt is noticed.
    """
    workers, team = library.threads(), library.team()
    if team or together == 1:
        for first in range(0, parts, together):
            _parallel.leave_if_dropped()
            kernel(*given, first, min(parts, first + together), parts, team, workers)
        return

    def work(first: int) -> None:
        for part in range(first, parts, together):
            _parallel.leave_if_dropped()
            kernel(*given, part, part + 1, parts, 0, 1)

    _parallel.for_each(work, range(together), workers=workers, library="compiled", initializer=_nothing)


def _nothing() -> None:
    """Prepare a thread: these kernels set nothing."""


def _work(given: tuple[Any, ...]) -> int:
    """Return about how many multiplications a call is."""
    items, heads, _, queries, keys, width, _, _, _, _, _, before, after, *_ = given
    work: int = items * heads * queries * min(keys, before + after + 1) * 3 * width
    return work


def _drawn(x: Operands, options: Options, xp: Namespace) -> tuple[Any, Any] | None:
    """Return the hashes of queries and keys that dropout goes by; the keys' have some to spare for whole vectors."""
    if not options.dropout:
        return None
    n_queries, n_keys = x.q.shape[-2], x.k.shape[-2]
    queries, keys = hashes(x, options, Chunk(0, n_queries, 0, n_keys, 0, 0, 0), xp=xp)
    return queries, xp.concat([keys, xp.zeros(LANES, dtype=keys.dtype)])


def _lent(x: Operands, lend: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Lend the arrays of a call, in the kernels' order."""
    q, k, v, rel_k, rel_v, rel_bias, rel_q, mask, key_table, *_ = x
    seen = added = None
    if mask is not None:
        if mask.dtype == q.dtype:
            added = lend(mask)
        else:
            seen = lend(mask)
    return (
        lend(q), lend(k), lend(v),
        None if rel_k is None else lend(rel_k),
        None if rel_v is None else lend(rel_v),
        None if rel_bias is None else lend(rel_bias[:, None]),
        None if rel_q is None else lend(rel_q),
        None if key_table is None else lend(key_table),
        seen, added,
    )  # fmt: skip

"""NumPy: where a chunk works. Memory that was written before costs no page faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import array_api_compat.numpy as xp
import numpy as np

from relskew_core._kernel import dropout
from relskew_core._kernel.chunk import Chunk
from relskew_core.backends._numpy.call import Array, HeadwiseCall


class Scratch:
    """The buffers of one worker, as long as the longest chunk needs them, and every chunk's views of them."""

    def __init__(self, call: HeadwiseCall) -> None:
        self._size = max((chunk.width * (chunk.stop - chunk.start) for chunk in call.chunks), default=0)
        self._call = call
        self._flat: dict[str, Array] = {}
        self._ones = np.ones(max((chunk.end - chunk.first for chunk in call.chunks), default=0), call.q.dtype)
        self._views: dict[int, Views] = {}

    def views(self, index: int) -> Views:
        """Return a chunk's views, made once for all heads."""
        if index not in self._views:
            call, chunk = self._call, self._call.chunks[index]
            n, m, dtype = chunk.stop - chunk.start, chunk.end - chunk.first, call.q.dtype
            relative = self._buffer("relative", n, chunk.width, dtype)
            hidden = call.hidden[index]
            self._views[index] = Views(
                chunk=chunk,
                relative=relative,
                moved=chunk.absolute(relative, xp=xp),
                logits=self._buffer("logits", n, m, dtype),
                negligible=self._buffer("negligible", n, m, bool),
                ones=self._ones[:m],
                by_pattern=Hidden(hidden, sum(int(entries.sum()) for _, entries in hidden)),
                by_both=None if call.segments is None else self._buffer("hidden", n, m, bool),
                drawn=None if call.drawn is None else self._buffer("drawn", n, m, np.uint32),
                shifted=None if call.drawn is None else self._buffer("shifted", n, m, np.uint32),
            )
        return self._views[index]

    def absolute(self, name: str, chunk: Chunk) -> Array:
        """Return a buffer in absolute layout, (n, m)."""
        return self._buffer(name, chunk.stop - chunk.start, chunk.end - chunk.first, self._call.q.dtype)

    def _buffer(self, name: str, n: int, m: int, dtype: type | np.dtype) -> Array:
        if name not in self._flat:
            self._flat[name] = np.empty(self._size, dtype)
        return self._flat[name][: n * m].reshape(n, m)


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the queries of a chunk may not see, masks aside."""

    parts: list[tuple[slice, Array]] = field(default_factory=list)  # columns, and which of their entries
    count: int = 0  # of all entries
    unseen: Array | None = None  # which keys no query sees (m,), None if each is seen

    def put(self, value: float, x: Array) -> None:
        """Put ``value`` into the hidden places of ``x``, (n, m)."""
        for columns, entries in self.parts:
            np.copyto(x[:, columns], value, where=entries)


@dataclass(frozen=True, slots=True)
class Views:
    """Where a chunk works."""

    chunk: Chunk
    relative: Array  # relative layout, (n, width)
    moved: Array  # the same memory in absolute layout, (n, m)
    logits: Array  # (n, m)
    negligible: Array  # booleans, (n, m)
    ones: Array  # (m,)
    by_pattern: Hidden
    by_both: Array | None  # booleans (n, m): what the pattern and segments hide
    drawn: Array | None  # integers of 32 bits, (n, m)
    shifted: Array | None

    def hidden(self, call: HeadwiseCall, batch: int) -> Hidden:
        """Return what is hidden from the queries of a batch entry."""
        segments, entries = call.of_segments(batch, self.chunk), self.by_both
        if segments is None or entries is None:
            return self.by_pattern
        queries, keys = segments
        np.not_equal(queries[:, None], keys, out=entries)
        for columns, by_pattern in self.by_pattern.parts:
            entries[:, columns] |= by_pattern
        unseen: Array = np.all(entries, axis=0)
        return Hidden([(slice(None), entries)], int(np.count_nonzero(entries)), unseen if unseen.any() else None)

    def drop(self, call: HeadwiseCall, batch: int, head: int) -> None:
        """Put zeros into the logits, weights by now, that dropout does not keep."""
        x, shifted = self.drawn, self.shifted
        if call.drawn is None or x is None or shifted is None:
            return
        rows, columns = call.drawn
        chunk = self.chunk
        np.bitwise_xor(rows[batch, head, chunk.start : chunk.stop], columns[chunk.first : chunk.end], out=x)
        for bits, factor in ((16, dropout.FIRST), (13, dropout.SECOND)):  # as `_kernel.dropout.stirred`
            np.right_shift(x, bits, out=shifted)
            np.bitwise_xor(x, shifted, out=x)
            np.multiply(x, np.uint32(factor), out=x)
        np.greater_equal(x.view(np.int32), dropout.threshold(call.options.dropout), out=self.negligible)
        np.multiply(self.logits, self.negligible, out=self.logits)

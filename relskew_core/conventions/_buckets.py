"""Tables by bucket, whose rows far positions share: T5 and DeBERTa."""

from __future__ import annotations

from dataclasses import dataclass

from relskew_core._array.checks import check_bool, check_int, describe, explains
from relskew_core._array.namespace import device, namespace_of_arrays
from relskew_core._array.precision import integer
from relskew_core._array.typing import Array
from relskew_core._functions.buckets import deberta_buckets, t5_buckets
from relskew_core._positions.span import Span, check_span_given
from relskew_core.conventions._convention import check_rows


@explains
@dataclass(frozen=True, kw_only=True)
class T5:
    """T5's table of buckets: a bias by relative position, for every length.

    ::

        bucket   0  1 … 15   16 17 … 31         32 buckets, bidirectional
        rel      0 -1 … far  -  +1 … far        16 is never used

    T5 does not scale its logits: ``relative_attention(..., scale=1.0)``.

    Parameters
    ----------
    bidirectional : bool
        Encoder (True) or decoder.
    num_buckets : int, default 32
        ``relative_attention_num_buckets``.
    max_distance : int, default 128
        ``relative_attention_max_distance``.

    Examples
    --------
    >>> import numpy as np
    >>> t5 = T5(bidirectional=False, num_buckets=4, max_distance=4)
    >>> rel_bias, span = t5.load(np.asarray([[0.0], [1.0], [2.0], [3.0]]))
    >>> rel_bias, span
    (array([[3., 3., 2., 1., 0.]]), Span(left=4, right=0, beyond='clip'))
    >>> t5.store(rel_bias, span)[:, 0]
    array([0., 1., 2., 3.])
    """

    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_bool("bidirectional", self.bidirectional)
        check_int("max_distance", self.max_distance, minimum=1)
        self._buckets(self.span)  # rejects numbers that make no buckets

    @property
    def span(self) -> Span:
        """Clipped at ``max_distance``, from which on all positions share a bucket."""
        return Span(self.max_distance, self.max_distance if self.bidirectional else 0, "clip")

    def load(self, table: Array) -> tuple[Array, Span]:
        """Convert a table of the other code base.

        Parameters
        ----------
        table : array, shape (num_buckets, H)
            ``relative_attention_bias.weight`` of the first layer. T5X's ``rel_embedding`` is its transpose.

        Returns
        -------
        rel_bias : array, shape (H, R)
            Numbers of ascending relative positions.
        span : Span
        """
        xp = namespace_of_arrays({"table": table})
        if table.ndim != 2 or table.shape[0] != self.num_buckets:
            raise ValueError(
                f"`table` must have shape ({self.num_buckets}, H), a row per bucket, got {describe(table)}"
            )
        return xp.matrix_transpose(_take(table, self._buckets(self.span))), self.span

    def store(self, rel_bias: Array, span: Span) -> Array:
        """Write a bias as T5's table; the inverse of :meth:`load`.

        Each bucket has the bias of its position nearest to the query; one without a position in ``span``, zeros.
        """
        xp = namespace_of_arrays({"rel_bias": rel_bias})
        check_span_given(span)
        if rel_bias.ndim != 2 or rel_bias.shape[-1] != span.rows:
            raise ValueError(f"`rel_bias` must have shape (H, {span.rows}) for {span}, got {describe(rel_bias)}")
        return _nearest(xp.matrix_transpose(rel_bias), span, self._buckets(span), self.num_buckets)

    def _buckets(self, span: Span) -> tuple[int, ...]:
        return t5_buckets(
            span, num_buckets=self.num_buckets, max_distance=self.max_distance, bidirectional=self.bidirectional
        )


@explains
@dataclass(frozen=True, kw_only=True)
class DeBERTa:
    """DeBERTa's relative embeddings, projected and split into heads: rows by relative position.

    ::

        row   0 …  S-1  S  S+1 … 2S-1        S = position_buckets
        rel  far …   1  0   -1 …  far        versions 2 and 3 share rows far away

    Parameters
    ----------
    position_buckets : int
        ``S``, half of the table's rows; version 1 calls it ``max_relative_positions``.
    max_distance : int or None
        As :func:`relskew_core.deberta_buckets` takes it: ``None`` for version 1.

    Examples
    --------
    >>> import numpy as np
    >>> version_1 = DeBERTa(position_buckets=2, max_distance=None)
    >>> table, span = version_1.load(np.asarray([[2.0], [1.0], [0.0], [-1.0]]))
    >>> table[:, 0], span
    (array([-1.,  0.,  1.,  2.]), Span(left=1, right=2, beyond='clip'))
    >>> version_1.store(table, span)[:, 0]
    array([ 2.,  1.,  0., -1.])
    """

    position_buckets: int
    max_distance: int | None

    def __post_init__(self) -> None:
        check_int("position_buckets", self.position_buckets, minimum=1)
        if self.max_distance is not None:
            check_int("max_distance", self.max_distance, minimum=1)
        self._rows(self.span)  # rejects numbers that make no buckets

    @property
    def span(self) -> Span:
        """Clipped where all further positions share a row."""
        if self.max_distance is None:
            return Span(self.position_buckets - 1, self.position_buckets, "clip")
        return Span(self.max_distance, self.max_distance, "clip")

    def load(self, table: Array) -> tuple[Array, Span]:
        """Convert a table of the other code base.

        Parameters
        ----------
        table : array, shape (2S, D) or (H, 2S, D)
            ``pos_key`` for the product with queries, ``pos_query`` for that with keys.

        Returns
        -------
        table : array, shape (R, D) or (H, R, D)
            Rows of ascending relative positions.
        span : Span
        """
        xp = namespace_of_arrays({"table": table})
        rows = 2 * self.position_buckets
        if table.ndim not in (2, 3) or table.shape[-2] != rows:
            raise ValueError(f"`table` must have shape ({rows}, D) or (H, {rows}, D), got {describe(table)}")
        return xp.moveaxis(_take(xp.moveaxis(table, -2, 0), self._rows(self.span)), 0, -2), self.span

    def store(self, table: Array, span: Span) -> Array:
        """Write rows by relative position as DeBERTa's; the inverse of :meth:`load`.

        Each row is that of its position nearest to the query; one without a position in ``span``, zeros.
        """
        check_rows("table", table, span)
        xp = namespace_of_arrays({"table": table})
        moved = _nearest(xp.moveaxis(table, -2, 0), span, self._rows(span), 2 * self.position_buckets)
        return xp.moveaxis(moved, 0, -2)

    def _rows(self, span: Span) -> tuple[int, ...]:
        return deberta_buckets(span, position_buckets=self.position_buckets, max_distance=self.max_distance)


def _take(table: Array, rows: tuple[int, ...]) -> Array:
    """Take rows by number along the first axis: once per table, never per pair of positions."""
    xp = namespace_of_arrays({"table": table})
    return xp.take(table, xp.asarray(list(rows), dtype=integer(xp), device=device(table)), axis=0)


def _nearest(rows: Array, span: Span, numbers: tuple[int, ...], count: int) -> Array:
    """Return, for each of ``count`` numbers, the nearest row to ``r = 0`` with that number; zeros if none has it."""
    xp = namespace_of_arrays({"rows": rows})
    nearest: dict[int, int] = {}
    for r in sorted(range(-span.left, span.right + 1), key=abs):
        nearest.setdefault(numbers[r + span.left], r + span.left)
    zeros = xp.zeros_like(rows[:1, ...])
    padded = xp.concat([rows, zeros], axis=0)
    return _take(padded, tuple(nearest.get(number, span.rows) for number in range(count)))

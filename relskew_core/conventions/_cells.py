"""Tables by cell of a window of patches: Swin and BEiT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from relskew_core._array.checks import describe, explains
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._functions.grid_layout import check_sides
from relskew_core._positions.span import Span


@explains
@dataclass(frozen=True, kw_only=True)
class Swin:
    """Swin's table of a window's relative cells: a bias by relative height and width, and depth in Video Swin.

    ::

        row  (query - key, height + h-1) · (2w-1) + (query - key, width + w-1)
        so   the first row is the key furthest below and right, the last the one furthest above and left

    Parameters
    ----------
    window : tuple of int
        Height ``h`` and width ``w``, after a depth in windows of three axes, as Video Swin and MONAI have them.

    Examples
    --------
    >>> import numpy as np
    >>> swin = Swin(window=(1, 2))
    >>> rel_bias, span_h, span_w = swin.load(np.asarray([[1.0], [0.0], [-1.0]]))
    >>> rel_bias
    array([[[-1.,  0.,  1.]]])
    >>> swin.store(rel_bias, span_h, span_w)[:, 0]
    array([ 1.,  0., -1.])
    """

    window: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = 3 if isinstance(self.window, (tuple, list)) and len(self.window) == 3 else 2
        object.__setattr__(self, "window", check_sides("window", self.window, axes, minimum=1))

    @property
    def spans(self) -> tuple[Span, ...]:
        """The span of each axis, which reaches equally far in both directions."""
        return tuple(map(Span.full, self.window))

    def load(self, table: Array) -> tuple[Any, ...]:
        """Convert a table of the other code base.

        Parameters
        ----------
        table : array, shape ((2h-1) · (2w-1), H)
            ``relative_position_bias_table``.

        Returns
        -------
        rel_bias : array, shape (H, 2h - 1, 2w - 1)
            For ``relative_attention_2d`` or ``toeplitz_2d``, or ``relative_attention_nd`` with three axes.
        span_h, span_w : Span
            ``Span.full(h)`` and ``Span.full(w)``, after that of the depth.
        """
        xp = namespace_of_arrays({"table": table})
        _check_cells(table, self.window, extra=0)
        rows = tuple(span.rows for span in self.spans)
        grid = xp.reshape(xp.matrix_transpose(table), (table.shape[1], *rows))
        return xp.flip(grid, axis=tuple(range(1, len(rows) + 1))), *self.spans

    def store(self, rel_bias: Array, *spans: Span) -> Array:
        """Write a bias as Swin's table; the inverse of :meth:`load`."""
        xp = namespace_of_arrays({"rel_bias": rel_bias})
        if spans != self.spans:
            raise ValueError(f"`spans` must be {self.spans}, all of the window {self.window}, got {spans}")
        rows = tuple(span.rows for span in self.spans)
        if tuple(rel_bias.shape[1:]) != rows:
            expected = ", ".join(map(str, rows))
            raise ValueError(f"`rel_bias` must have shape (H, {expected}), got {describe(rel_bias)}")
        flipped = xp.flip(rel_bias, axis=tuple(range(1, len(rows) + 1)))
        return xp.matrix_transpose(xp.reshape(flipped, (rel_bias.shape[0], math.prod(rows))))


@explains
@dataclass(frozen=True, kw_only=True)
class BEiT:
    """BEiT's table: Swin's cells, and three rows for the class token.

    ::

        row    0 … (2h-1)(2w-1)-1   as Swin's
        row   -3                    class token as query, a patch as key
        row   -2                    a patch as query, class token as key
        row   -1                    class token to itself

    Parameters
    ----------
    window : (int, int)
        Height ``h`` and width ``w`` in patches.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.asarray([[5.0], [1.0], [2.0], [3.0]])
    >>> rel_bias, prefix_bias, *_ = BEiT(window=(1, 1)).load(table)
    >>> rel_bias, prefix_bias
    (array([[[5.]]]), array([[2., 1., 3.]]))
    """

    window: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", check_sides("window", self.window, 2, minimum=1))

    def load(self, table: Array) -> tuple[Array, Array, Span, Span]:
        """Convert a table of the other code base.

        Parameters
        ----------
        table : array, shape ((2h-1) · (2w-1) + 3, H)
            ``relative_position_bias_table``.

        Returns
        -------
        rel_bias : array, shape (H, 2h - 1, 2w - 1)
        prefix_bias : array, shape (H, 3)
            In the order of ``relative_attention_2d``: a patch at the class token, the class token at a patch, at
            itself.
        span_h, span_w : Span
            ``Span.full(h)`` and ``Span.full(w)``.
        """
        xp = namespace_of_arrays({"table": table})
        _check_cells(table, self.window, extra=3)
        rel_bias, span_h, span_w = Swin(window=self.window).load(table[:-3, :])
        return rel_bias, xp.matrix_transpose(_exchanged(table[-3:, :])), span_h, span_w

    def store(self, rel_bias: Array, prefix_bias: Array, span_h: Span, span_w: Span) -> Array:
        """Write biases as BEiT's table; the inverse of :meth:`load`."""
        xp = namespace_of_arrays({"rel_bias": rel_bias, "prefix_bias": prefix_bias})
        cells = Swin(window=self.window).store(rel_bias, span_h, span_w)
        if tuple(prefix_bias.shape) != (rel_bias.shape[0], 3):
            raise ValueError(f"`prefix_bias` must have shape ({rel_bias.shape[0]}, 3), got {describe(prefix_bias)}")
        return xp.concat([cells, _exchanged(xp.matrix_transpose(prefix_bias))], axis=0)


def _check_cells(table: Array, window: tuple[int, ...], *, extra: int) -> None:
    cells = math.prod([2 * side - 1 for side in window])
    if table.ndim != 2 or table.shape[0] != cells + extra:
        rows = f"{cells} + {extra}" if extra else cells
        raise ValueError(f"`table` must have shape ({rows}, H) for the window {window}, got {describe(table)}")


def _exchanged(rows: Array) -> Array:
    """Exchange the first two of three rows: the rows of the class token have a different order here."""
    xp = namespace_of_arrays({"rows": rows})
    return xp.concat([rows[1:2, :], rows[:1, :], rows[2:, :]], axis=0)

"""One table of another code base as a value: the relative position of each of its rows."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Literal

from relskew_core._array.checks import check_choice, check_int, describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._positions.span import Beyond, Span, check_span_given

Order = Literal["ascending", "descending"]
Reach = Literal["past", "odd", "even", "any"]


@dataclass(frozen=True)
class Convention:
    """The relative position ``rel = key - query`` of each row of another code base's table.

    Print one to see its rows drawn; ``store(*load(table))`` is ``table`` again.

    Parameters
    ----------
    name : str
        Whose table it is, for messages.
    order : {"ascending", "descending"}
        Whether ``rel`` grows or falls from row to row.
    reach : {"past", "odd", "even", "any"}
        Which relative positions ``R`` rows are: ``-(R-1) … 0``; ``-n … n`` of ``R = 2n + 1``; ``-(n-1) … n`` of
        ``R = 2n``; or any, ``"odd"`` unless :meth:`load` gets the number of those in the past.
    beyond : {"error", "clip", "zero"}
        What their code does at relative positions that have no row, as :class:`~relskew_core.Span` says it.
    shared_axis : bool, default False
        A table that all heads share has a first axis of 1.
    text : str, default ""
        What the value says of itself in ``help`` and when it is printed.

    Examples
    --------
    >>> import numpy as np
    >>> mine = Convention("mine", "descending", "past", "clip")
    >>> table, span = mine.load(np.asarray([[0.0], [-1.0], [-2.0]]))
    >>> table[:, 0], span
    (array([-2., -1.,  0.]), Span(left=2, right=0, beyond='clip'))
    >>> mine.store(table, span)[:, 0]
    array([ 0., -1., -2.])
    """

    name: str
    order: Order
    reach: Reach
    beyond: Beyond
    shared_axis: bool = False
    text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_choice("order", self.order, ("ascending", "descending"))
        check_choice("reach", self.reach, ("past", "odd", "even", "any"))
        check_choice("beyond", self.beyond, ("error", "clip", "zero"))
        if self.text:  # else the text of the class
            object.__setattr__(self, "__doc__", inspect.cleandoc(self.text))

    def __str__(self) -> str:
        return self.__doc__ if self.text and self.__doc__ else repr(self)

    def load(self, table: Array, *, left: int | None = None) -> tuple[Array, Span]:
        """Convert a table of the other code base.

        Parameters
        ----------
        table : array, shape (R, D) or (H, R, D)
            Rows as their code has them.
        left : int, optional
            How many rows lie in the past, where ``reach`` is ``"any"``; half of an odd number by default.

        Returns
        -------
        table : array, shape (R, D) or (H, R, D)
            Rows of ascending relative positions; unchanged where the other table ascends.
        span : Span
            Which relative positions they are.
        """
        return load_named(self, "table", table, left=left)

    def store(self, table: Array, span: Span) -> Array:
        """Write a table in the order of the other code base; the inverse of :meth:`load`.

        A table or span that the other code cannot hold raises an error that says why.
        """
        check_rows("table", table, span)
        if (misfit := _misfit(self.reach, span)) is not None:
            raise ValueError(f"`span` must {misfit}, as tables of {self.name} do, got {span}")
        if span.beyond != self.beyond and "error" not in (span.beyond, self.beyond):
            raise ValueError(
                f"`span` must have beyond={self.beyond!r} or 'error', as tables of {self.name} have, got {span}"
            )
        stored = self._turned(table)
        return stored[None, ...] if self.shared_axis and table.ndim == 2 else stored

    def _turned(self, table: Array) -> Array:
        if self.order == "ascending":
            return table
        return namespace_of_arrays({"table": table}).flip(table, axis=-2)


def load_named(convention: Convention, name: str, table: Array, *, left: int | None = None) -> tuple[Array, Span]:
    rows = _count_rows(name, table)
    span = _span(convention, name, table, rows, left)
    ascending = convention._turned(table)
    if convention.shared_axis and ascending.ndim == 3 and ascending.shape[0] == 1:
        ascending = ascending[0, ...]
    return ascending, span


def check_rows(name: str, table: Array, span: Span) -> None:
    rows = _count_rows(name, table)
    check_span_given(span)
    if rows != span.rows:
        raise ValueError(f"`{name}` must have the {span.rows} rows of {span}, got {describe(table)}")


def _count_rows(name: str, table: Array) -> int:
    namespace_of_arrays({name: table})
    if table.ndim not in (2, 3) or table.shape[-2] < 1:
        raise ValueError(f"`{name}` must have shape (R, D) or (H, R, D), R >= 1, got {describe(table)}")
    return int(table.shape[-2])


def _span(convention: Convention, name: str, table: Array, rows: int, left: int | None) -> Span:
    whose, reach, beyond = convention.name, convention.reach, convention.beyond
    if left is not None:
        left = check_int("left", left, minimum=0)
        if reach != "any":
            raise ValueError(f"`left` must be None: the rows of {whose} say it themselves, got {left}")
        if left >= rows:
            raise ValueError(f"`left` must be less than the number of rows, {rows}, got {left}")
        return Span(left, rows - 1 - left, beyond)
    if reach == "past":
        return Span(rows - 1, 0, beyond)
    parity = "even" if reach == "even" else "odd"
    if parity != ("odd" if rows % 2 else "even"):
        unless = " unless `left` is given" if reach == "any" else ""
        raise ValueError(
            f"`{name}` must have an {parity} number of rows, as tables of {whose} have{unless}, got {describe(table)}"
        )
    return Span((rows - 1) // 2, rows // 2, beyond)


def _misfit(reach: Reach, span: Span) -> str | None:
    if reach == "past" and span.right:
        return "end at 0"
    if reach == "odd" and span.left != span.right:
        return "reach as far ahead as back"
    if reach == "even" and span.right != span.left + 1:
        return "reach one further ahead than back"
    return None

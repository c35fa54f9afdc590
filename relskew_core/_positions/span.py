"""The relative positions of the rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from relskew_core._array.checks import check_choice, check_int, describe, explains

Beyond = Literal["error", "clip", "zero"]
BEYOND = get_args(Beyond)  # at import: torch 2.6 does not compile `get_args`


@explains
@dataclass(frozen=True, slots=True)
class Span:
    """The relative positions ``-left … right`` of a table's rows, ascending.

    Row ``c`` of the table belongs to the relative position ``r = c - left``, where
    ``r = key position - query position``: negative is the past, positive the future.

    Parameters
    ----------
    left, right : int
        How many positions the table reaches into the past and into the future, both ``>= 0``.
    beyond : {"error", "clip", "zero"}, default "error"
        What happens at relative positions outside the span that some query may see:
        raise a ``ValueError``, repeat the edge row (Shaw et al. 2018, section 3.2), or contribute nothing.

    See Also
    --------
    relative_attention : takes a span with its tables.
    relskew_core.draw.draw_span : a picture of a span.

    Examples
    --------
    >>> span = Span(2, 1)
    >>> span.rows
    4
    >>> list(range(-span.left, span.right + 1))
    [-2, -1, 0, 1]
    """

    left: int
    right: int
    beyond: Beyond = "error"

    def __post_init__(self) -> None:
        left, right, beyond = self.left, self.right, self.beyond
        if type(left) is not int or type(right) is not int or left < 0 or right < 0:
            object.__setattr__(self, "left", check_int("left", left, minimum=0))
            object.__setattr__(self, "right", check_int("right", right, minimum=0))
        if type(beyond) is not str or beyond not in BEYOND:
            check_choice("beyond", beyond, BEYOND)

    @property
    def rows(self) -> int:
        """Number of rows of a table with this span, ``left + right + 1``."""
        return self.left + self.right + 1

    @classmethod
    def causal(cls, n: int, beyond: Beyond = "error") -> Span:
        """Span of the ``n`` relative positions ``-(n-1) … 0``: Music Transformer's ``E_r`` (Huang et al. 2018).

        Use ``beyond="clip"`` for language models whose inputs may be longer than the table.

        Examples
        --------
        >>> Span.causal(5)
        Span(left=4, right=0, beyond='error')
        >>> Span.causal(5, "clip")
        Span(left=4, right=0, beyond='clip')
        """
        return cls(check_int("n", n, minimum=1) - 1, 0, beyond)

    @classmethod
    def full(cls, n: int, beyond: Beyond = "error") -> Span:
        """Span of the ``2n - 1`` relative positions ``-(n-1) … n-1``: every pair of ``n`` positions.

        Examples
        --------
        >>> Span.full(5)
        Span(left=4, right=4, beyond='error')
        """
        reach = check_int("n", n, minimum=1) - 1
        return cls(reach, reach, beyond)

    @classmethod
    def clipped(cls, k: int) -> Span:
        """Span ``-k … k`` whose edge rows are used for all farther positions (Shaw et al. 2018, section 3.2).

        Examples
        --------
        >>> Span.clipped(2)
        Span(left=2, right=2, beyond='clip')
        """
        reach = check_int("k", k, minimum=0)
        return cls(reach, reach, "clip")


def check_span_given(span: Any) -> None:
    if not isinstance(span, Span):
        raise TypeError(f"`span` must be a Span{span_hint(span)}, got {describe(span)}")


def span_hint(given: Any) -> str:
    """Return the span that a length or a pair of reaches may mean, for an error."""
    match given:
        case bool():
            return ""
        case int(n) if n > 0:
            return f", such as Span.causal({n}), Span.full({n}) or Span.clipped({n})"
        case tuple((int(left), int(right))) | list((int(left), int(right))):  # a memoryview is a sequence, too
            return f", such as Span({abs(left)}, {abs(right)})"
    return ""

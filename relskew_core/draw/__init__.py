"""Pictures of spans, of the keys that queries see, and of weights: in a notebook, a terminal, or a file."""

from relskew_core.draw._cells import Cell, Panel
from relskew_core.draw._picture import Picture
from relskew_core.draw._span import draw_call, draw_span
from relskew_core.draw._weights import draw_weights

__all__ = ["Cell", "Panel", "Picture", "draw_call", "draw_span", "draw_weights"]

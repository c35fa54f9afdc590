"""Pictures of spans, of the keys that queries see, and of weights: in a notebook, a terminal, or a file."""

from relskew_core.draw._functions import draw_call, draw_span, draw_weights
from relskew_core.draw._picture import Cell, Panel, Picture

__all__ = ["Cell", "Panel", "Picture", "draw_call", "draw_span", "draw_weights"]

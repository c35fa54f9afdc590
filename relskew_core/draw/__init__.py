"""Pictures of spans, of visible keys, of the skew, and of weights: as SVG without any package, or as PNG.

Notebooks display them, and ``relskew draw`` writes them or prints them in a terminal.
"""

from relskew_core.draw._call import draw_call
from relskew_core.draw._picture import Picture
from relskew_core.draw._skew import animate_skew, draw_skew
from relskew_core.draw._span import draw_span
from relskew_core.draw._weights import draw_weights

__all__ = ["Picture", "animate_skew", "draw_call", "draw_skew", "draw_span", "draw_weights"]

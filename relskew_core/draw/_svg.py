"""Shapes as SVG: text that can be read aloud and copied, in light and dark, without any package."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable
from html import escape

from relskew_core.draw._colours import DARK, HUES, LIGHT, Paint, rgb
from relskew_core.draw._shapes import LETTERS, PAD, WIDTH, Box, Shape, Words


def svg(title: str, shapes: Iterable[Shape], height: float) -> str:
    """Return a picture of the shapes."""
    return document(title, height, "\n".join(element(shape) for shape in shapes))


def document(title: str, height: float, inside: str, style: str = "") -> str:
    """Return a complete SVG around its elements; its styles do not affect the rest of a page."""
    attributes = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" font-size="{LETTERS}" role="img"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="relskew" {attributes}>\n<title>{escape(title)}</title>\n'
        f"<style>\n{STYLE}{style}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="{PAD}"/>\n{inside}\n</svg>\n'
    )


def element(shape: Shape) -> str:
    """Return a shape as an element."""
    if isinstance(shape, Box):
        side = f'width="{shape.side:.4g}" height="{shape.side:.4g}" rx="{shape.side / 10:.2g}"'
        return f'<rect class="{shape.paint.hue}" {_at(shape)} {side} opacity="{shape.paint.cover:.2g}"/>'
    if isinstance(shape, Words):
        names = [name for name, is_so in (("faint", shape.ink == "faint"), ("bold", shape.bold)) if is_so]
        names += [] if shape.anchor == "middle" else [shape.anchor]
        kind = f' class="{" ".join(names)}"' if names else ""
        size = "" if shape.size == LETTERS else f' font-size="{shape.size:.3g}"'
        return f'<text{kind} {_at(shape)} dy=".35em"{size}>{escape(shape.text)}</text>'
    data = base64.b64encode(png(shape.paints)).decode()
    width, height = (count * shape.side for count in (len(shape.paints[0]), len(shape.paints)))
    return (
        f'<image {_at(shape)} width="{width:.5g}" height="{height:.5g}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    )


def _at(shape: Shape) -> str:
    return f'x="{shape.x:.5g}" y="{shape.y:.5g}"'


def _style() -> str:
    def fills(colours: dict[str, str]) -> str:
        return "".join(f".relskew .{name}{{fill:{colour}}}" for name, colour in colours.items())

    def paper(colours: dict[str, str]) -> str:
        return f".relskew text{{fill:{colours['ink']}}}{fills({k: v for k, v in colours.items() if k != 'ink'})}\n"

    letters = "{font-family:system-ui,sans-serif;text-anchor:middle}"
    return (
        f".relskew text{letters}.relskew .start{{text-anchor:start}}.relskew .end{{text-anchor:end}}"
        f".relskew .bold{{font-weight:600}}\n{fills(HUES)}\n{paper(LIGHT)}"
        f"@media(prefers-color-scheme:dark){{{paper(DARK).rstrip()}}}\n"
    )


STYLE = _style()


def png(paints: list[list[Paint]]) -> bytes:
    """Return colours as pixels of the smallest possible PNG with transparency."""
    empty = rgb(HUES["self"])  # visible on light and dark paper
    rows = (
        b"\0" + b"".join(bytes((*(rgb(HUES[p.hue]) if p.hue in HUES else empty), round(255 * p.cover))) for p in row)
        for row in paints
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(paints[0]), len(paints), 8, 6, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"".join(rows), 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)

"""Triton: the skew of a tile by shuffles between the threads that hold a row, as PTX for compute capability 9.

Triton's own gather moves a tile to another layout and back, which takes longer than all products of the tile. In the
layout of a product of 64 × 64 by four warps (``wgmma``'s), row ``16 w + 8 s + r`` lies in the four threads ``4 r + a``
of warp ``w``, ``a = 0 … 3``, and its column ``8 n + 2 a + b`` in register ``4 n + 2 s + b``. Turning a row by
``16 w + 8 s`` columns therefore only renames registers, which four copies of the code do, one for each warp. Turning it
by ``r`` more stays within the four threads: each picks what it sends, and sends a column of every eight twice.
"""

from __future__ import annotations

from collections.abc import Iterator

SIZE, WARPS = 64, 4
"""The rows and columns of a tile, and the warps that hold it: 32 numbers in each thread."""

Step = tuple[str, str, tuple[str, ...]]
"""An instruction: its name, the register that it writes, and what it reads."""

HALVES = (0, 1)
GROUPS = range(8)


def places() -> Iterator[tuple[int, int, int, int]]:
    """Yield the registers of a tile, with the eight columns, the half of the rows and the column of a pair."""
    for n in GROUPS:
        for s in HALVES:
            for b in HALVES:
                yield 4 * n + 2 * s + b, n, s, b


SETUP: tuple[Step, ...] = (
    ("mov", "thread", ("%tid.x",)),
    ("and", "a", ("thread", "3")),
    ("shr", "r", ("thread", "2")),
    ("and", "r", ("r", "7")),
    ("shr", "down", ("r", "1")),  # half of r, rounded down and up
    ("add", "up", ("r", "1")),
    ("shr", "up", ("up", "1")),
    ("and", "low", ("r", "1")),
    ("setp.ne", "odd", ("low", "0")),
    ("and", "row", ("thread", "28")),  # the first of the four threads
    ("shr", "warp", ("thread", "5")),
)


def skew(warp: int) -> Iterator[Step]:
    """Yield the steps for :func:`tiles.skew`: column ``c`` of row ``i`` is column ``64 + c - i`` of both windows."""
    yield "sub", "from0", ("a", "up")
    yield "sub", "from1", ("a", "down")
    yield "add", "to0", ("a", "up")
    yield "add", "to1", ("a", "down")
    yield "setp.ge", "carries0", ("to0", "4")
    yield "setp.ge", "carries1", ("to1", "4")
    yield from _senders()
    for s in HALVES:
        first = 7 - 2 * warp - s  # of the sixteen groups of eight columns of both windows
        for m in range(first, first + 9):
            window, n = ("earlier", m) if m < 8 else ("later", m - 8)
            yield from _picked(f"{s}_{m}", *(f"{window}{4 * n + 2 * s + b}" for b in HALVES))
    for k, n, s, b in places():
        m = 8 + n - 2 * warp - s
        yield "selp", "sent", (f"z{s}_{m - 1}_{b}", f"z{s}_{m}_{b}", f"carries{b}")
        yield "shfl", f"out{k}", ("sent", f"sender{b}")


def unskew(warp: int) -> Iterator[Step]:
    """Yield the steps for :func:`tiles.unskew`: column ``c`` of row ``i`` is column ``i + c`` of a tile, or zero."""
    yield "add", "from0", ("a", "down")
    yield "add", "from1", ("a", "up")
    yield "setp.lt", "carries0", ("a", "down")
    yield "setp.lt", "carries1", ("a", "up")
    # whether the column that arrives lies in the next eight
    yield "setp.ge", "arrives0", ("from0", "4")
    yield "setp.ge", "arrives1", ("from1", "4")
    yield from _senders()
    for k, n, s, b in places():
        if not b:
            yield from _picked(f"{s}_{n}", f"tile{k}", f"tile{k + 1}")
    for k, n, s, b in places():
        m = n + 2 * warp + s
        yield "selp", "sent", (f"z{s}_{(m + 1) % 8}_{b}", f"z{s}_{m % 8}_{b}", f"carries{b}")
        if m == 7:
            yield "shfl", "got", ("sent", f"sender{b}")
            yield "selp", f"earlier{k}", ("got", "zero", f"arrives{b}")
            yield "selp", f"later{k}", ("zero", "got", f"arrives{b}")
        else:
            got, other = ("earlier", "later") if m > 7 else ("later", "earlier")
            yield "shfl", f"{got}{k}", ("sent", f"sender{b}")
            yield "mov", f"{other}{k}", ("zero",)


def _senders() -> Iterator[Step]:
    for b in HALVES:
        yield "and", f"from{b}", (f"from{b}", "3")
        yield "or", f"sender{b}", (f"from{b}", "row")


def _picked(name: str, even: str, odd: str) -> Iterator[Step]:
    """Yield the steps that exchange a pair in odd rows, where even columns become odd ones."""
    yield "selp", f"z{name}_0", (odd, even, "odd")
    yield "selp", f"z{name}_1", (even, odd, "odd")


KINDS = {"skew": (skew, ("out", "earlier", "later")), "unskew": (unskew, ("earlier", "later", "tile"))}
"""The steps of each kind, and its operands of 32 registers: results first."""

SUFFIXES = {"mov": "b32", "and": "b32", "or": "b32", "selp": "b32", "shr": "u32"}  # of others: s32


def ptx(kind: str) -> str:
    """Return the instructions of ``"skew"`` or ``"unskew"`` for all warps, as inline assembly."""
    steps, names = KINDS[kind]
    operands = {f"{name}{k}": f"${32 * place + k}" for place, name in enumerate(names) for k in range(32)}
    lines: list[str] = []
    registers: dict[str, str] = {}

    def register(name: str) -> str:
        return name if name[0] in "%0123456789" else operands.get(name, "x_" + name)

    def add(step: Step) -> None:
        name, target, sources = step
        if target not in operands:
            registers[target] = "pred" if name.startswith("setp") else "b32"
        given = ", ".join(map(register, (target, *sources)))
        lines.append(
            f"shfl.sync.idx.b32 {given}, 31, -1;" if name == "shfl" else f"{name}.{SUFFIXES.get(name, 's32')} {given};"
        )

    for step in (*SETUP, ("mov", "zero", ("0",))):
        add(step)
    for warp in range(1, WARPS):
        add(("setp.eq", f"is{warp}", ("warp", str(warp))))
        lines.append(f"@x_is{warp} bra WARP{warp};")
    for warp in range(WARPS):
        lines.append(f"WARP{warp}:")
        for step in steps(warp):
            add(step)
        lines.append("bra DONE;")
    declared = [f".reg .{kind} x_{name};" for name, kind in registers.items()]
    return "\n".join(["{", *declared, *lines, "DONE:", "}"])


def constraints(kind: str, *, rows: bool = False) -> str:
    """Return the kinds of its operands: numbers that it writes before it has read all others, and the others.

    ``rows``: also of the numbers of the rows, which it does not read.
    """
    results = {"skew": 1, "unskew": 2}[kind]
    return ",".join(["=&f"] * (32 * results) + ["f"] * (32 * (3 - results)) + ["r"] * (32 * rows))

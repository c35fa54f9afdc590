"""The cost of splitting a sequence over GPUs, by calculation.

Nothing here is measured. Peaks and bandwidths are assumptions, at the top; the rest follows from what
``relskew_core.distributed.torch`` computes and sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.runner import Benchmark, Call, Case, Record, markdown

HEADS, KEY_HEADS, WIDTH, BYTES = 32, 8, 128, 2  # bfloat16
FORWARD, BACKWARD = 400e12, 300e12  # operations per second that kernels reach
NEAR, FAR = 450e9, 50e9  # bytes per second of a GPU: within a node of eight, and between nodes
REACHED = 0.8  # the share of each that is reached
NODE = 8


@dataclass(frozen=True, slots=True)
class Split:
    """A ring of groups of neighbours that exchange heads, and the kind of table."""

    length: int
    ring: int
    heads: int
    table: str  # "shared" or "by head"
    reach: int | None = None  # of a window and its table; None: all keys

    @property
    def bandwidth(self) -> float:
        """The bandwidth of the ring, which is lower between nodes."""
        return REACHED * (NEAR if self.ring * self.heads <= NODE else FAR)

    @property
    def rounds(self) -> int:
        """The number of shards of keys that a shard of queries sees on the busiest device."""
        share = self.length // self.ring
        return self.ring if self.reach is None else min(self.ring, -(-self.reach // share) + 1)

    def seconds(self, *, backward: bool) -> tuple[float, float]:
        """Return the seconds of computation, and those including communication, of a layer on one GPU.

        Causal and balanced: every round costs the same. Three products of forward, with keys, values and table, are
        seven of backward. Computation hides what is sent as far as it goes, but not the exchange of heads.
        """
        share, heads = self.length // self.ring, HEADS // self.heads
        of_keys = max(1, KEY_HEADS // self.heads)
        seen = share * (self.length / 2 if self.reach is None else self.reach) / self.rounds
        products, speed = (7, BACKWARD) if backward else (3, FORWARD)
        compute = products * 2 * seen * WIDTH * heads / (REACHED * speed)
        # Keys and values; the backward pass also sends their gradients, in float32.
        sent = 2 * share * of_keys * WIDTH * (BYTES + (4 if backward else 0))
        own = self.length // (self.ring * self.heads) * WIDTH * BYTES * (2 if backward else 1)
        exchanged = 2 * (HEADS + KEY_HEADS) * own * (self.heads - 1) / self.heads / (REACHED * NEAR)
        return compute * self.rounds, compute + (self.rounds - 1) * max(compute, sent / self.bandwidth) + exchanged

    @property
    def efficiency(self) -> float:
        """The share of computation in the time, forward and backward."""
        parts = [self.seconds(backward=backward) for backward in (False, True)]
        return sum(compute for compute, _ in parts) / sum(whole for _, whole in parts)

    @property
    def table_bytes(self) -> float:
        rows = self.length if self.reach is None else self.reach + 1
        return rows * WIDTH * BYTES * (HEADS // self.heads if self.table == "by head" else 1)


class Devices(Benchmark):
    page = "development/devices.md"
    names = ("arithmetic",)
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        tables = (("shared", None), ("by head", None), ("by head", 4096))
        for length, ring, table in itertools.product((2**17, 2**20), ((8, 1), (1, 8), (64, 1), (8, 8)), tables):
            if (*ring, table[1]) != (1, 8, 4096):
                yield asdict(Split(length, *ring, *table))

    def prepare(self, case: Case, contender: str) -> Call:
        return lambda: Split(**case)

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        seconds = sum(result.seconds(backward=backward)[0] for backward in (False, True))
        return {"seconds": seconds, "efficiency": result.efficiency, "table_bytes": result.table_bytes}

    def texts(self, record: Record) -> dict[str, str]:
        header = ("L", "ring × heads", "table", "computing, forward and backward", "efficiency", "table on a GPU")

        def line(case: Case, seconds: float, efficiency: float, table_bytes: float) -> tuple[str, ...]:
            table = case["table"] + ("" if case["reach"] is None else f", a window of {case['reach']}")
            where = f"{case['length'] // 1024}k", f"{case['ring']} × {case['heads']}", table
            return *where, f"{seconds * 1e3:.2f} ms", f"{efficiency:.0%}", f"{table_bytes / 2**20:.0f} MiB"

        return {"": markdown(header, (line(row.case, **row.facts) for row in record.rows))}

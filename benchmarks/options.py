"""Options of a call beside the dense mask or bias that people write for them today: ``python -m benchmarks.options``.

torch on one thread, causal unless an option says otherwise, with a table of relative positions. Times are taken in
turns in one process; memory in a fresh process each, as in :mod:`benchmarks.memory`.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
import typer
from rich.console import Console
from torch import Tensor

from benchmarks import machine, report
from benchmarks.memory import M_MMAP_THRESHOLD, ROOT
from benchmarks.targets import MIB
from benchmarks.timing import interleave
from relskew_core import Span, relative_attention
from relskew_core.cli._measure import resident_peak

HEADS, DIM, REACH, DROPOUT, SOFTCAP = 8, 64, 64, 0.1, 30.0
PAGE = ROOT / "docs" / "options.md"


class Inputs(NamedTuple):
    """The arrays of one problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor  # (2 · REACH + 1, D), clipped
    sinks: Tensor
    scale: Tensor
    documents: Tensor
    stamps: Tensor

    @classmethod
    def draw(cls, length: int, *, gradients: bool) -> Inputs:
        """Draw them: 64 documents, time stamps with gaps and repeats."""
        generator = torch.Generator().manual_seed(0)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).requires_grad_(gradients)

        content = (1, HEADS, length, DIM)
        return cls(
            *(floats(*content) for _ in range(3)),
            floats(2 * REACH + 1, DIM),
            floats(HEADS),
            floats(HEADS),
            torch.arange(length) * 64 // length,
            torch.randint(0, 4, (length,), generator=generator).cumsum(0),
        )


def _rows(x: Inputs, stamps: Tensor | None = None) -> Tensor:
    steps = torch.arange(x.q.shape[-2]) if stamps is None else stamps
    return (steps[None, :] - steps[:, None]).clamp(-REACH, REACH) + REACH


def _bias(x: Inputs, visible: Tensor, rows: Tensor, scale: Any = DIM**-0.5) -> Tensor:
    product = (x.q * scale) @ x.table.mT
    return product.gather(-1, rows.expand(*product.shape[:-1], -1)).masked_fill(~visible, -torch.inf)


def _causal(x: Inputs) -> Tensor:
    return torch.ones(x.q.shape[-2], x.q.shape[-2], dtype=torch.bool).tril()


def _sdpa(x: Inputs, bias: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias, **options)


def _ours(x: Inputs, **options: Any) -> Any:
    return relative_attention(x.q, x.k, x.v, x.table, Span.clipped(REACH), **options)


def _dense_sinks(x: Inputs) -> Tensor:
    logits = x.q @ x.k.mT * DIM**-0.5 + _bias(x, _causal(x), _rows(x))
    sinks = x.sinks[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ x.v


def _dense_softcap(x: Inputs) -> Tensor:
    sums = x.q @ x.k.mT * DIM**-0.5 + (x.q * DIM**-0.5 @ x.table.mT).gather(-1, _rows(x).expand(1, HEADS, -1, -1))
    return ((sums / SOFTCAP).tanh() * SOFTCAP).masked_fill(~_causal(x), -torch.inf).softmax(-1) @ x.v


def _dense_key_table(x: Inputs) -> Tensor:
    of_keys = (x.k * DIM**-0.5 @ x.table.mT).gather(-1, _rows(x).mT.expand(1, HEADS, -1, -1)).mT
    return _sdpa(x, _bias(x, torch.ones_like(_causal(x)), _rows(x)) + of_keys)


def _offsets(x: Inputs, offset: Any) -> Any:
    """Attend with the heads as the items of a batch."""
    q, k, v = (y.movedim(1, 0) for y in (x.q, x.k, x.v))
    out: Any = relative_attention(q, k, v, x.table, Span.clipped(REACH), causal=True, offset=offset)
    return out.movedim(0, 1)


def _dense_offsets(x: Inputs) -> Tensor:
    steps = torch.arange(x.q.shape[-2])
    r = steps[None, :] - (steps + torch.arange(HEADS)[:, None])[..., None]
    return _sdpa(x, _bias(x, r <= 0, r.clamp(-REACH, REACH) + REACH))


def _padding(x: Inputs) -> Tensor:
    return (torch.arange(x.q.shape[-2]) < x.q.shape[-2] * 7 // 8)[None, None, None]


def _dense_blocks(x: Inputs) -> Tensor:
    block = torch.arange(x.q.shape[-2]) // 128
    behind = block[:, None] - block[None, :]
    return _sdpa(x, _bias(x, (behind >= 0) & (behind <= 2), _rows(x)))


def _dense_positions(x: Inputs) -> Tensor:
    visible = x.stamps[None, :] <= x.stamps[:, None]
    return _sdpa(x, _bias(x, visible, _rows(x, x.stamps)))


def _dense_scales(x: Inputs) -> Tensor:
    scale = x.scale[:, None, None]
    scaled = x._replace(q=x.q * scale)
    return F.scaled_dot_product_attention(
        scaled.q, x.k, x.v, attn_mask=_bias(scaled, _causal(x), _rows(x), 1.0), scale=1.0
    )


@dataclass(frozen=True)
class Option:
    """An option, ours and what it is written as today."""

    call: str
    ours: Callable[[Inputs], Any]
    dense: Callable[[Inputs], Tensor]
    exact: bool = True  # both compute the same numbers


OPTIONS = {
    "none": Option("causal alone", lambda x: _ours(x, causal=True), lambda x: _sdpa(x, _bias(x, _causal(x), _rows(x)))),
    "sinks": Option("sinks=(H,)", lambda x: _ours(x, causal=True, sinks=x.sinks), _dense_sinks),
    "softcap": Option("softcap=30", lambda x: _ours(x, causal=True, softcap=SOFTCAP), _dense_softcap),
    "padding": Option(
        "mask=(B, 1, 1, L), not causal",
        lambda x: _ours(x, mask=_padding(x)),
        lambda x: _sdpa(x, _bias(x, _padding(x), _rows(x))),
    ),
    "key_table": Option("key_table=(R, D), not causal", lambda x: _ours(x, key_table=x.table), _dense_key_table),
    "offsets": Option("offset, by item", lambda x: _offsets(x, [*range(HEADS)]), _dense_offsets),
    "segments": Option(
        "segments, 64 documents",
        lambda x: _ours(x, causal=True, segments=x.documents),
        lambda x: _sdpa(x, _bias(x, _causal(x) & (x.documents[:, None] == x.documents), _rows(x))),
    ),
    "blocks": Option(
        "block_size=128, blocks_before=2", lambda x: _ours(x, block_size=128, blocks_before=2), _dense_blocks
    ),
    "positions": Option(
        "positions, time stamps", lambda x: _ours(x, causal=True, positions=(x.stamps, x.stamps)), _dense_positions
    ),
    "scale": Option("scale=(H,)", lambda x: _ours(x, causal=True, scale=x.scale), _dense_scales),
    "dropout": Option(
        "dropout=0.1",
        lambda x: _ours(x, causal=True, dropout=DROPOUT, seed=1),
        lambda x: _sdpa(x, _bias(x, _causal(x), _rows(x)), dropout_p=DROPOUT),
        exact=False,
    ),
}


@dataclass(frozen=True)
class Row:
    """One option at one length, ours and dense."""

    option: str
    length: int
    backward: bool
    seconds: tuple[float, float]
    peak: tuple[int, int] | None = None  # bytes above the inputs


def work(option: str, which: str, length: int, *, backward: bool) -> Callable[[], Any]:
    """Return the call that is measured."""
    x = Inputs.draw(length, gradients=backward)
    function = getattr(OPTIONS[option], which)
    if not backward:
        return lambda: function(x)
    d_out = torch.ones_like(x.v)
    wanted = [y for y in x if y.is_floating_point()]
    return lambda: torch.autograd.grad(function(x), wanted, d_out, allow_unused=True)


def peak(option: str, which: str, length: int, *, backward: bool) -> int:
    """Measure the peak memory of one call in a fresh process."""
    question = json.dumps({"option": option, "which": which, "length": length, "backward": backward})
    command = [sys.executable, "-m", "benchmarks.options", "--child", question]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return int(answer.stdout.splitlines()[-1])


def child(question: str) -> int:
    """Answer a question of :func:`peak`; only sound in a fresh process."""
    import ctypes

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    torch.set_num_threads(1)
    asked = json.loads(question)
    work(asked["option"], asked["which"], 512, backward=asked["backward"])()  # as long calls go, kernels and all
    call = work(asked["option"], asked["which"], asked["length"], backward=asked["backward"])
    kept: list[Any] = []
    gc.collect()
    found = resident_peak(lambda: kept.append(call()))
    if found is None:
        raise RuntimeError("peak memory needs Linux's resettable high-water mark and glibc's malloc")
    return found


def check(option: str, length: int) -> None:
    """Refuse to measure what is not the same."""
    x, this = Inputs.draw(length, gradients=False), OPTIONS[option]
    if this.exact:
        torch.testing.assert_close(this.ours(x), this.dense(x), rtol=0, atol=2e-5)


def measure(lengths: list[int], tell: Callable[[str], None]) -> list[Row]:
    """Measure every option at every length; memory at the last."""
    rows = []
    for option in OPTIONS:
        check(option, 512)
        for length in lengths:
            for backward in (False, True):
                tell(f"{option}: L = {length}{' with backward' if backward else ''}")
                calls = {which: work(option, which, length, backward=backward) for which in ("ours", "dense")}
                for call in calls.values():
                    call()
                timed = interleave(calls, rounds=5, budget=2.0)
                peaks = None
                if length == lengths[-1]:
                    ours, dense = (peak(option, which, length, backward=backward) for which in ("ours", "dense"))
                    peaks = ours, dense
                rows.append(Row(option, length, backward, (timed["ours"].seconds, timed["dense"].seconds), peaks))
    return rows


def table(rows: list[Row]) -> report.Table:
    """Return times and memory beside each other."""
    lengths = sorted({row.length for row in rows})
    of = {(row.option, row.length, row.backward): row for row in rows}
    header = ["ours, and of the dense one's"]
    for length in lengths:
        header += [f"L = {length}", "with backward"]
    header += [f"memory at {lengths[-1]}", "with backward"]
    lines = []
    for option, what in OPTIONS.items():
        cells = [f"`{what.call}`" if option != "none" else what.call]
        for length in lengths:
            for backward in (False, True):
                ours, dense = of[option, length, backward].seconds
                cells.append(f"{report.seconds(ours)} ({ours / dense:.2f}×)")
        for backward in (False, True):
            peaks = of[option, lengths[-1], backward].peak
            cells.append("–" if peaks is None else f"{peaks[0] / MIB:.0f} of {peaks[1] / MIB:.0f} MiB")
        lines.append(tuple(cells))
    return report.Table("Options beside dense masks, torch, one thread", tuple(header), lines)


def main(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "1024,4096",
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/options.md, and store the record.")] = False,
    question: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Time and memory of each option of a call, beside the dense mask that people write today."""
    if question:
        print(child(question))
        return
    console, about = Console(), machine.describe()
    torch.set_num_threads(1)
    with console.status("") as status:
        rows = measure([int(part) for part in lengths.split(",")], status.update)
    found = table(rows)
    report.show(found, console)
    if docs:
        path = ROOT / "benchmarks" / "records" / f"options-{machine.name(about)}"
        lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
        path.write_text(f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
        versions, day = f"torch {about['versions']['torch']}", about["date"][:10]
        where = f"{about['cpu']}, {versions}, one thread, commit {about['commit']}, {day}."
        report.put(PAGE, "benchmarks.options", f"{where}\n\n{report.markdown(found)}")


if __name__ == "__main__":
    typer.run(main)

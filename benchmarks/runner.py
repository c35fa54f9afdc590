"""The base of every benchmark: cases, contenders that take turns in one run, records of rows, and tables of pages."""

from __future__ import annotations

import ctypes
import datetime
import gc
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

import relskew_core
from relskew_core.backends import _compiled

END = "<!-- end of measured -->"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ("---", *["---:"] * " | ".join(header).count(" | "))
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def pivot(cells: Iterable[tuple[str, str, str]], corner: str = "", none: str = "–") -> str:
    """Return a table of cells: row, column and text. Rows and columns keep the cells' order."""
    of = {(line, column): text for line, column, text in cells}
    if not of:
        return "Nothing was measured."
    lines, columns = (dict.fromkeys(names) for names in zip(*of, strict=True))
    rows = ((line, *(of.get((line, column), none) for column in columns)) for line in lines)
    return markdown((corner, *columns), rows)


def mark(name: str, part: str = "") -> str:
    """Return the comment of a page that precedes a benchmark's tables, or a part of them."""
    return f"<!-- measured: python -m benchmarks {name} --docs{f', {part}' if part else ''} -->"


def put(page: Path, begin: str, text: str, end: str = END) -> None:
    """Put a text between two comments on a page."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} must have the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def as_time(seconds: float) -> str:
    """Return a time in the right unit, with three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def as_memory(count: float) -> str:
    return f"{count / 2**20:.{int(count < 10 * 2**20)}f} MiB"


def after(training: bool) -> str:
    return ", with backward" if training else ""


def left_out(rows: Iterable[Row], what: Callable[[Row], str]) -> Iterator[str]:
    """Yield why rows have no numbers, those with the same reason together."""
    skipped = [row for row in rows if row.skipped is not None]
    for reason in dict.fromkeys(row.skipped for row in skipped):
        names = dict.fromkeys(what(row) for row in skipped if row.skipped == reason)
        yield f"Not run: {'; '.join(names)}: {reason}."


def verdicts(lines: Iterable[Sequence[Any]]) -> str:
    """Return a table of promises: name, target, measurement, and whether it is reached, if that is measured."""
    words = {True: "reached", False: "**missed**", None: "–"}
    return markdown(("", "target", "measured", ""), ((*texts, words[good]) for *texts, good in lines))


Call = Callable[[], Any]
Case = dict[str, Any]
"""The arguments of a case, as names and numbers that a record and a fresh process can hold."""

Key = TypeVar("Key", bound=Hashable)

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PAUSE_SECONDS = 0.15  # before a turn: threads of another library keep spinning for 0.1 s after their last call
TURN_SECONDS = 0.1  # of a turn at least, which repeats short calls


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one case: its measurements, or the reason why there are none."""

    case: Case
    contender: str
    fastest: float | None = None  # seconds of the fastest call
    median: float | None = None  # seconds
    cpu: float | None = None  # median of the seconds of CPU time
    ratio: float | None = None  # median, over turns, of the CPU time as a multiple of the first contender's
    bytes: int | None = None  # peak memory of a call above its inputs, including results
    error: float | None = None  # relative L2 error of the result
    skipped: str | None = None
    facts: Case = field(default_factory=dict)  # further results


class Benchmark:
    """Cases and contenders. ``NAMES`` of the command line lists the modules."""

    names: tuple[str, ...] = ()  # the contenders; multiples refer to the time of the first one
    unlike: tuple[str, ...] = ()  # those that compute something else
    measures = frozenset({"time"})  # "time", "memory", both, or only facts about the result
    tolerance = float("inf")  # the largest error of a right result
    page = legend = corner = ""  # the file in ``docs/`` for the tables, and their texts above and in the corner
    none = "–"  # of an empty cell
    seconds = 1.5  # of each contender in each case
    threads: int | None = 1  # of torch; None: all
    pauses = False  # whether turns wait for other libraries' threads
    pairs = False  # whether contenders take turns with the first one only: all together need too much memory
    forks = False  # whether memory is measured in forks of this process, if imports take longer than the calls
    fallible = False  # whether the failure of a contender is a result, too
    small: ClassVar[Case] = {}  # the changes that make a case cheap, to warm up a fresh process

    def begin(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def cases(self) -> Iterable[Case]:
        raise NotImplementedError

    def contenders(self, case: Case) -> Iterable[str]:
        return self.names

    def prepare(self, case: Case, contender: str) -> Call:
        raise NotImplementedError

    def skip(self, case: Case, contender: str) -> str | None:
        return None

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        """Return the error of a result, compared with the first contender's in this process, if any."""
        same = first is not None and contender not in self.unlike and self.tolerance < float("inf")
        return distance(result, first) if same else None

    def gate(self, case: Case) -> float:
        return self.tolerance

    def measures_of(self, case: Case) -> Set[str]:
        return self.measures

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {}

    def group(self, case: Case) -> Hashable:
        """Return the group of a case: cases of one group take turns, so that their times can be divided."""
        return tuple(case.items())

    def doubts(self, rows: list[Row]) -> bool:
        """Return whether rows should be measured again, for eight times as long."""
        return False

    def texts(self, record: Record) -> Mapping[str, str]:
        """Return the texts between the page's comments, by their names; most pages have one, ``""``."""
        cells = sorted(self.cells(record), key=self.order)
        return {"": f"{record.where}\n\n{self.legend}{pivot(cells, self.corner, self.none)}"}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        """Yield the cells of the page's table: row, column and text."""
        raise NotImplementedError

    def order(self, cell: tuple[str, str, str]) -> Any:
        """Return the key to sort the cells by."""
        return 0

    def time(self, calls: Mapping[Key, Call], seconds: float, first: Callable[[Key], Key]) -> Mapping[Key, Case]:
        return turns(calls, seconds, first, pause=PAUSE_SECONDS if self.pauses else 0.0)

    def memory(self, name: str, case: Case, contender: str) -> Case:
        """Measure the peak memory of one call, with its time and error."""
        if not self.forks:
            return self.apart(name, case, contender)[0]
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(self.answer, case, contender).result()

    def apart(self, name: str, case: Case, contender: str, **environment: str) -> tuple[Case, str]:
        """Return the answer of a fresh process, and its output."""
        command = [sys.executable, "-m", "benchmarks", name, "--child", json.dumps([case, contender])]
        options: Any = {"capture_output": True, "text": True, "timeout": 900, "check": False}
        ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, **options)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or [""])[-1]  # first here, as records keep the beginning
            raise RuntimeError(f"{last} ({contender} fails at {case} with {ended.returncode}:\n{ended.stderr[-2000:]})")
        return json.loads(ended.stdout.splitlines()[-1]), ended.stdout + ended.stderr

    def answer(self, case: Case, contender: str) -> Case:
        """Answer the question of ``memory`` in a fresh process.

        It warms up (libraries load their kernels, thread pools start), makes the inputs, gives freed memory back to the
        system, calls once, and reads the high-water mark of its resident memory. Buffers of 128 KiB and more go back to
        the system as soon as they are freed, so that the mark is of what lives at once.
        """
        if hasattr(libc := ctypes.CDLL(None), "mallopt"):
            libc.mallopt(-3, 128 * 1024)  # M_MMAP_THRESHOLD of malloc.h
        self.begin()
        self.prepare(case | {key: min(x, case[key]) for key, x in self.small.items()}, contender)()
        call, ended = self.prepare(case, contender), list[Any]()
        gc.collect()
        peak = resident_peak(lambda: ended.extend((time.perf_counter(), call(), time.perf_counter())))
        if peak is None:
            raise RuntimeError("peak memory needs Linux's resettable high-water mark and glibc's malloc")
        start, result, stop = ended
        return {"bytes": peak, "fastest": stop - start, "error": self.check(case, contender, result, None)}

    def run(self, name: str, cases: Iterable[Case], seconds: float, only: Iterable[str] = ()) -> Iterator[list[Row]]:
        for _, group in itertools.groupby(cases, self.group):
            grouped, wanted = list(group), set(only)
            if self.pairs:
                yield list(self._pairs(name, grouped[0], seconds, wanted))
                continue
            rows = self._measure(name, grouped, seconds, wanted)
            yield self._measure(name, grouped, 8 * seconds, wanted) if self.doubts(rows) else rows

    def _pairs(self, name: str, case: Case, seconds: float, only: set[str]) -> Iterator[Row]:
        first, *others = (each for each in self.contenders(case) if not only or each in only)
        yield from self._measure(name, [case], seconds, {first})
        for other in others:
            yield self._measure(name, [case], seconds, {first, other})[-1]

    def _measure(self, name: str, cases: list[Case], seconds: float, only: set[str]) -> list[Row]:
        rows, calls = dict[tuple[int, str], Row](), dict[tuple[int, str], Call]()
        firsts: dict[int, tuple[int, str]] = {}
        for number, case in enumerate(cases):
            first, measures = None, self.measures_of(case)
            for contender in (each for each in self.contenders(case) if not only or each in only):
                key, row = (number, contender), Row(case, contender, skipped=self.skip(case, contender))
                firsts.setdefault(number, key)
                try:
                    if row.skipped is None and "memory" in measures:
                        row = replace(row, **self.memory(name, case, contender))
                    if row.skipped is None and measures != {"memory"}:
                        call = self.prepare(case, contender)
                        result = call()  # warms up, too
                        error = self.check(case, contender, result, first)
                        row = replace(row, error=error, facts=self.facts(case, contender, result))
                        first = result if first is None else first
                        del result
                        if "time" in measures:
                            calls[key] = call
                except Exception as error:
                    if not self.fallible:
                        raise
                    row = replace(row, skipped=reason(error))
                if row.error is not None and not row.error <= self.gate(case):
                    row = replace(row, skipped=f"wrong by {row.error:.1e}")
                    calls.pop(key, None)
                rows[key] = row
        times = self.time(calls, seconds, lambda key: firsts[key[0]])
        return [replace(row, **times.get(key, {})) for key, row in rows.items()]


def turns(
    calls: Mapping[Key, Call], seconds: float, first: Callable[[Key], Key], pause: float = 0.0
) -> dict[Key, Case]:
    """Time calls that were made once before, in turns, starting each round with another contender.

    Each has two turns at least, and turns until it has spent its ``seconds``; a turn repeats a short call. So a load of
    the machine slows all of them, and multiples are medians over rounds. Freeing a result is not timed.
    """
    taken: dict[Key, list[list[tuple[float, float]]]] = {key: [] for key in calls}
    spent = dict.fromkeys(calls, 0.0)
    number, waiting = 0, list(calls)
    while waiting:
        shift = number % len(waiting)
        for key in waiting[shift:] + waiting[:shift]:
            began = time.perf_counter()
            time.sleep(pause)
            taken[key].append(list(_turn(calls[key], min(TURN_SECONDS, seconds / 8))))
            spent[key] += time.perf_counter() - began
        waiting = [key for key in calls if len(taken[key]) < 2 or spent[key] < seconds]
        number += 1
    return {key: _summary(own, taken.get(first(key))) for key, own in taken.items()}


def _turn(call: Call, seconds: float) -> Iterator[tuple[float, float]]:
    began = stop = time.perf_counter()
    while stop == began or stop - began < seconds:
        cpu, start = time.process_time(), time.perf_counter()
        result = call()
        stop, ended = time.perf_counter(), time.process_time()
        del result
        yield stop - start, ended - cpu


def _summary(own: list[list[tuple[float, float]]], base: list[list[tuple[float, float]]] | None) -> Case:
    wall, cpu = zip(*itertools.chain(*own), strict=True)
    found = {"fastest": min(wall), "median": statistics.median(wall), "cpu": statistics.median(cpu)}
    if base is not None:
        one, other = ([statistics.fmean(cpu for _, cpu in turn) for turn in turns] for turns in (own, base))
        shares = [x / y for x, y in zip(one, other, strict=False) if y]
        found["ratio"] = statistics.median(shares) if shares else None
    return found


STATUS = Path("/proc/self/status")


def resident_peak(call: Call) -> int | None:
    """Return by how many bytes a call's peak exceeds the memory before it, ``None`` where no system counts it."""

    def status(field: str) -> int:
        if (match := re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)) is None:
            raise OSError(f"{STATUS} has no {field}")
        return int(match[1]) * 1024

    try:
        status("VmRSS")
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # freed pages of the heap return to the system
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = status("VmRSS")
        call()
        return max(0, status("VmHWM") - before)
    except OSError:
        return None


def passes(function: Callable[..., Any], given: Sequence[Any], training: bool) -> Call:
    """Return a call of tensors, or with ``training`` one that returns the gradients of them all."""
    learned = [x.detach().requires_grad_(training) for x in given]
    d_out = torch.randn(given[0].shape, dtype=given[0].dtype, generator=torch.Generator().manual_seed(0))

    def call() -> Any:
        out = function(*learned)
        return torch.autograd.grad(out, learned, d_out) if training else out

    return call


def distance(result: Any, expected: Any) -> float:
    """Return the relative L2 error of an array, or the largest of several."""
    if isinstance(expected, (tuple, list)):
        return max(itertools.starmap(distance, zip(result, expected, strict=True)))
    arrays = (x.detach().cpu().double() if isinstance(x, torch.Tensor) else x for x in (result, expected))
    one, other = (np.asarray(x, np.float64) for x in arrays)
    if one.shape != other.shape:
        raise ValueError(f"gives {one.shape} instead of {other.shape}")
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def reason(error: BaseException) -> str:
    """Return the first error, in one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


PACKAGES = ("numpy", "torch", "jax", "triton", "onnx", "onnxruntime", "transformers", "x-transformers")


@dataclass(frozen=True, slots=True)
class Record:
    machine: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write one line per row, so that records can be compared."""
        rows = ",\n".join("  " + json.dumps({k: x for k, x in asdict(row).items() if x not in (None, {})})
                          for row in self.rows)  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f'{{"machine": {json.dumps(self.machine, indent=1)},\n"rows": [\n{rows}\n]}}\n'
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["machine"], [Row(**row) for row in stored["rows"]])

    @classmethod
    def newest(cls, name: str, wanted: Callable[[Record], bool] = lambda _: True) -> Record:
        """Return the newest record of a benchmark that is wanted, an empty one if there is none."""
        paths = sorted(RECORDS.glob(f"{name}-*.json"), key=lambda path: path.stem[-10:], reverse=True)
        return next(filter(wanted, map(cls.load, paths)), cls({}, []))

    def path(self, name: str) -> Path:
        """Return the path of a benchmark's record, by device and date."""
        device = re.sub(r"[^a-z0-9]+", "-", str(self.machine["device"]).lower()).strip("-")
        cores = "" if self.machine["device"] != self.machine["cpu"] else f"-{self.machine['cores']}-cores"
        return RECORDS / f"{name}-{device}{cores}_{str(self.machine['date'])[:10]}.json"

    def measured(self, **wanted: Any) -> Iterator[Row]:
        """Yield the rows with numbers, of the cases with these entries."""
        for row in self.rows:
            if row.skipped is None and all(row.case.get(key) == x for key, x in wanted.items()):
                yield row

    def by_case(self) -> Iterator[tuple[Case, dict[str, Row]]]:
        """Yield every case with its rows that have numbers, by contender."""
        found: dict[str, tuple[Case, dict[str, Row]]] = {}
        for row in self.measured():
            found.setdefault(str(row.case), (row.case, {}))[1][row.contender] = row
        yield from found.values()

    @property
    def where(self) -> str:
        """Return one line about the machine of the record."""
        m = self.machine
        threads = f"{m['torch_threads']} thread{'s' * (m['torch_threads'] != 1)} of {m['cores']} cores"
        versions = [f"{name} {number}" for name, number in m["versions"].items() if number]
        device = filter(None, (*dict.fromkeys((m.get("device"), m["cpu"])), m.get("level")))
        about = (*device, threads, f"load {m['load_average']} at the start", *versions, f"commit {m['commit']}")
        return ", ".join((*about, str(m["date"])[:10])) + "."


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine, the versions and the commit, ready for JSON."""
    info, cuda = Path("/proc/cpuinfo"), {}
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    cpu = named[1].strip() if named else platform.processor() or platform.machine()
    if device != "cpu":  # pragma: gpu only
        found = torch.cuda.get_device_properties(device)
        cuda = {"device": found.name, "capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": cpu,
        "cpu": cpu,
        "level": _compiled.kernels.LEVELS[-1] if _compiled.kernels is not None else None,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),  # above 0 before the first call if others use the machine, too
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES} | {"relskew": relskew_core.__version__},
        "torch_threads": torch.get_num_threads(),
    } | cuda


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):  # an installed copy has no history
        changed = git("status", "--porcelain", "-uno", "relskew_core", "backends", "export", "benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + "+changes" * bool(changed)
    return None

"""The benchmarks at tiny sizes: all compute the same, a record is written, read back, and shown on its page."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import calls, families, graphs, jobs, models, runner, runtimes, short, unverified
from benchmarks.contenders import CONTENDERS, Shape, prepare, reference
from benchmarks.runner import Benchmark, Case, Record, Row, resident_peak
from relskew_core import attention_block, init_weights
from relskew_core.backends import _compiled
from relskew_core.export._files.library import found_library
from tracked import IN_GIT

ROOT = Path(__file__).parents[2]
PAGES = [name for name in cli.NAMES if cli.load(name).page]
NO_MEMORY = pytest.mark.skipif(resident_peak(lambda: None) is None, reason="the system does not count peak memory")


def test_error_notices_a_wrong_result() -> None:
    shape = Shape(96, heads=2, dim=16)
    out = prepare(CONTENDERS["huang"], shape)()
    out[0, 1, 0] += 1e-3
    assert reference(shape, "full", shape.length).error(out, gradient=False) > calls.GATE
    assert reference(shape, "full").error(prepare(CONTENDERS["plain"], shape)(), gradient=False) > 0.1


def tiny(name: str) -> list[str]:
    """Return the options that make a benchmark cheap: small cases, and of each kind some."""
    sections = [f"section={each}" for each in calls.SECTIONS if each not in ("memory", "long")]
    some = [f"call={each}" for each in ("causal", "mask of keys", "8 documents", "dropout")]
    slow = ("flex", "x-transformers")
    changes, only, who = {
        "calls": ("length=64 block_size=16 window=16", sections, " ".join(set(CONTENDERS) - set(slow))),
        "compiled": ("length=40", some, ""),
        "peak": ("length=40", ["training=False"], ""),
        "half": ("queries=70 keys=70", ["training=True"], ""),
        "grids": ("items=1 heads=2 width=8 side=4", ["training=True"], ""),
        "short": ("batch=1 heads=2 dim=8", [f"length={each}" for each in (16, 17, 67)] + ["threads=1"], ""),
        "first": ("length=32", ["first=relskew --help", "first=None"], ""),
        "options": ("length=96", [], ""),
        "families": ("", [], ""),
        "jobs": ("", [], ""),
        "export": ("width=16 reach=16 length=7", [f"form={each}" for each in ("causal", "blocks", "decoding")], ""),
        "operator": ("width=8 length=16 reach=17", [], ""),
        "quantise": ("width=64 rows=64", [], ""),
        "runtimes": ("", [], ""),
        "gpu": ("device=cpu dtype=float32 batch=1 heads=2 dim=16 length=40", ["causal=True", "queries=None"],
                "torch torch-clipped torch-plain torch-portable sdpa-flash sdpa-cudnn sdpa-bias huang"),
        "gpu_graphs": ("provider=CPUExecutionProvider length=16 rounds=1 dtype=float32",
                       ["form=full", "kernels=usual"], ""),
    }[name]  # fmt: skip
    options = [part for each in changes.split() for part in ("--set", each)]
    options += [part for each in only for part in ("--only", each)]
    return [*options, *(["--contenders", *who.split()] if who else [])]


TEXTBOOKS = [f"{kind}: Music Transformer, pad–reshape–slice" for kind in ("torch", "torch, dynamo=False")]
FEW = {
    "export": (graphs.BARE, graphs.CHUNKED, graphs.IN_PLACE, "relskew `ort`", *TEXTBOOKS),
    "gpu_graphs": (graphs.BARE, "relskew `portable`"),
}
"""Of contenders that each take torch's exporter seconds, or a process."""


class Twice(torch.nn.Module):
    """A model that holds so much more than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (torch.ones(x.shape[0], 2**18) * 2, {"y": self.one * 2 * torch.ones(x.shape[0], 2**18)})

    def generate(self, **options: Any) -> int:
        return int(options["max_new_tokens"])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Make small what no option makes small, and what is not installed here."""
    monkeypatch.setattr(models, "WIDTH", 32)
    model = families.Model(Twice, lambda length: {"x": torch.zeros(length)}, Twice, lengths=(1, 2, 3, 4))
    monkeypatch.setattr(families, "MODELS", {"twice": model, "pixels": replace(model, generating=None, lengths=(5,))})
    monkeypatch.setattr(families, "replace_attention", lambda model: model)
    music = jobs.JOBS["Music Transformer"]._replace(cases=((1, 6, 2), (2, 6, jobs.STEP)))
    monkeypatch.setattr(jobs, "JOBS", {"Music Transformer": music})
    monkeypatch.setattr(jobs, "music", lambda made: models.CausalModel(made, 16, layers=1).eval())
    monkeypatch.setattr(jobs, "KEPT", tmp_path / "jobs")
    # another test measures it in separate processes
    monkeypatch.setattr(Benchmark, "memory", lambda *_: {"bytes": 2**20})
    monkeypatch.setattr(runtimes, "FORMS", {name: runtimes.FORMS[name] for name in ("full", "cache")})
    monkeypatch.setattr(runtimes, "RELEASES", [each for each in runtimes.RELEASES if not each.packages][:1])
    monkeypatch.setattr(runtimes, "PROFILES", {"portable": (18, 23)})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    threads = torch.get_num_threads()
    yield
    families.pair.cache_clear()
    jobs.pair.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", cli.NAMES)
def test_cases_run_and_their_record_is_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("operator", "jobs") and found_library() is None:
        pytest.skip("no operator library was compiled at installation")
    path, options = tmp_path / "record.json", tiny(name)
    if name in FEW:
        options += ["--contenders", *FEW[name]]
    assert cli.main([name, *options, "--seconds", "0", "--json", str(path)]) == 0
    record = Record.load(path)
    record.save(again := tmp_path / "again.json")
    assert again.read_text() == path.read_text()
    assert record.machine["cores"] >= 1
    measured = list(record.measured())
    assert measured
    assert set(FEW.get(name, ())) <= {row.contender for row in measured}
    elsewhere = {row.contender for row in record.rows if row.skipped == "not compiled for this processor"}
    assert {row.contender for row in record.rows if row.skipped} - elsewhere <= {"sdpa-cudnn", "tables"}
    benchmark = cli.load(name)
    for row in measured:
        assert row.error is None or row.error <= benchmark.gate(row.case)
        assert (row.cpu is not None) == ("time" in benchmark.measures_of(row.case))
    printed = capsys.readouterr().out
    for part, text in benchmark.texts(record).items():
        assert text in printed
        assert text.count("|") > 4 or part == "where"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_newest_record(name: str, tmp_path: Path) -> None:
    benchmark, record = cli.load(name), Record.newest(name)
    page = Path(shutil.copy(ROOT / "docs" / benchmark.page, tmp_path))
    for part, text in benchmark.texts(record).items():
        runner.put(page, runner.mark(name, part), text)
    assert page.read_text() == (ROOT / "docs" / benchmark.page).read_text()


@pytest.mark.parametrize(
    ("commit", "load", "why"), [("abc+changes", 0.1, "your changes"), ("abc", 1.6, "quiet machine")]
)
def test_pages_get_records_of_commits_on_a_quiet_machine(commit: str, load: float, why: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(cli, "machine", lambda device: {"commit": commit, "load_average": load, "cores": 2})
    with pytest.raises(SystemExit, match=why):
        cli.main(["short", "--docs"])


@pytest.mark.skipif(not IN_GIT, reason="the history is in git")
def test_pages_name_commits_of_the_history_that_are_not_old() -> None:
    """A record is old after 300 commits that change what it measures."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    if git("rev-parse", "--is-shallow-repository") == ["true"]:
        pytest.skip("only the last commits are here")
    shown = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"\bcommit ([0-9a-f]{7,}(?:\+changes)?)", shown))
    assert len(named) > 4
    history = "\n".join(["", *git("rev-list", "HEAD")])
    assert not {name for name in named if f"\n{name}" not in history}
    for name in named:
        assert len(git("rev-list", f"{name}..HEAD", "--", "relskew_core", "backends", "export")) <= 300, name


class Counting(Benchmark):
    """One contender adds up, one is wrong, one is broken."""

    names = ("right", "wrong", "broken", "missing")
    page, fallible, tolerance = "none.md", True, 0.5

    def cases(self) -> Iterator[Case]:
        yield from ({"size": size} for size in (3, 4, 4))

    def skip(self, case: Case, contender: str) -> str | None:
        return "is not here" if contender == "missing" else None

    def prepare(self, case: Case, contender: str) -> Callable[[], Any]:
        if contender == "broken":
            raise RuntimeError("no\nkernel") from ValueError("the cause")
        return lambda: np.full(case["size"], 1.0 if contender == "right" else 2.0)

    def texts(self, record: Record) -> dict[str, str]:
        return {"": runner.pivot((row.contender, str(row.case["size"]), str(row.skipped)) for row in record.rows)}


@pytest.mark.parametrize("pairs", [False, True], ids=["together", "in pairs"])
def test_a_wrong_or_missing_contender_is_a_row(pairs: bool, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    benchmark = Counting()
    benchmark.pairs = pairs
    monkeypatch.setattr(cli, "load", lambda name: benchmark)
    path = tmp_path / "record.json"
    assert cli.main(["short", "--only", "size=4", "--seconds", "0", "--json", str(path)]) == 1
    rows = Record.load(path).rows
    assert [row.contender for row in rows] == ["right", "wrong", "broken", "missing"]
    assert [row.skipped for row in rows] == [None, "wrong by 1.0e+00", "ValueError: the cause", "is not here"]
    assert [row.cpu is None for row in rows] == [False, True, True, True]
    assert "size=4: wrong: wrong by 1.0e+00" in capsys.readouterr().err
    benchmark.fallible = False
    with pytest.raises(RuntimeError, match="no\nkernel"):
        cli.main(["short", "--seconds", "0"])


def test_command_line_refuses_what_no_case_has() -> None:
    with pytest.raises(SystemExit, match="no case has width: "):
        cli.main(["short", "--only", "width=3"])
    assert list(cli.chosen([{"n": 1, "m": 2}, {"n": 3, "m": 2}], ["n=1", "n=3"], ["n=5"])) == [{"n": 5, "m": 2}]


@NO_MEMORY
def test_memory_sees_what_a_call_allocates() -> None:
    case = {"section": "memory", "length": 1024, "heads": 2, "dim": 16, "backward": False}
    plain, textbook = (calls.Calls().memory("calls", case, name) for name in ("plain", "huang"))
    square = 4 * 2 * 1024**2
    assert 2.9 * square < textbook["bytes"] < 3.5 * square
    assert 0 < plain["bytes"] < square
    assert textbook["error"] < calls.GATE


@NO_MEMORY
@pytest.mark.no_cover
@pytest.mark.skipif(_compiled.kernels is None, reason="torch's operator, which is needed without kernels, takes more")
@pytest.mark.parametrize(("library", "mib"), [("torch", 25), ("NumPy", 15), ("JAX", 25)])
def test_a_first_call_takes_little_memory(library: str, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "PROCESSES", 2)
    assert 0 < short.First().memory("first", {"first": library}, "relskew")["bytes"] <= mib * 2**20


def test_the_pictures_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from docs.site import charts

    whole = Record.newest("jobs")
    paths = [*charts.draw(Record.newest("calls"), tmp_path), *charts.draw_jobs(whole, tmp_path)]
    page = "".join((ROOT / name).read_text() for name in ("docs/benchmarks.md", "docs/whole-jobs.md", "README.md"))
    assert len(paths) == (12 if whole.rows else 10)
    for path in paths:
        shown = ROOT / "docs" / "benchmarks" / path.name
        assert f"benchmarks/{path.name.replace('-dark', '')}" in page
        words = [re.findall(r"<text[^>]*>(.*?)</text>", drawn.read_text()) for drawn in (path, shown)]
        assert words[0] == words[1], f"{shown.name} is not of the newest record"
    assert "matplotlib.pyplot" not in sys.modules or "agg" in sys.modules["matplotlib"].get_backend().lower()


@pytest.mark.parametrize("name", ["causal", "full", "clip"])
def test_the_bare_block_is_the_block_with_empty_tables(name: str) -> None:
    spec = graphs.forms(16, width=16, heads=2)[name].spec
    weights = init_weights(spec, seed=0)
    weights["rel_k"] = weights["rel_k"] * 0
    model = graphs.without_positions(spec, init_weights(spec, seed=0))
    assert "rel_k" not in {tensor.name for tensor in model.graph.initializer}
    assert len(model.graph.node) == 9
    x = np.random.default_rng(0).standard_normal((1, 7, 16)).astype(np.float32)
    (y,) = graphs.open_session(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, np.asarray(attention_block(x, weights, spec)), atol=1e-5)


@pytest.mark.parametrize(("seconds", "met"), [(0.0179, True), (0.0181, False)])
def test_targets_compare_with_the_promise(seconds: float, met: bool) -> None:
    case = {"section": "forward", "length": 2048, "backward": False}
    rows = [Row(case, name, fastest=x) for name, x in (("plain", 0.01), ("torch", seconds))]
    found = {name: good for name, _, _, good in calls.outcomes(Record({}, rows))}
    assert found["forward, torch, L = 2048, of plain SDPA"] is met
    assert found["forward, NumPy, L = 2048, of torch's plain SDPA"] is None


def test_what_is_unverified_is_run_and_written(tmp_path: Path) -> None:
    """The rows of the page have a command that is there, and fit six minutes; other rows say how they end."""
    found = list(unverified.rows(unverified.PAGE.read_text(encoding="utf-8")))
    assert "T5" in found[0][0]
    assert sum(seconds for _, _, seconds in found) <= 360
    for _, command, _ in found:
        module, *rest = command[2:]
        assert rest[0] in cli.NAMES if module == "benchmarks" else any((ROOT / each).is_file() for each in rest)
    page, (begin, end) = tmp_path / "page.md", unverified.MARKS
    rows = [("good", "platform", 60), ("bad", "timeit -n 1 missing", 60), ("long", "timeit 'while True: pass'", 3)]
    lines = "".join(f"| {what} | `python -m {command}` | {seconds} | much |\n" for what, command, seconds in rows)
    page.write_text(f"## Not verified yet\n\n{lines}\n{begin}\nold\n{end}\nrest\n")
    assert unverified.main(["--page", str(page), "--out", str(tmp_path), "--device", "cpu"]) == 1
    shown = re.findall(r"\| (\w+) \| (.*) \| \d+ \|$", page.read_text().partition(begin)[2], re.MULTILINE)
    assert shown == [("good", "passed"), ("bad", "failed"), ("long", "cut off after 3 s")]
    assert page.read_text().endswith(f"{end}\nrest\n")
    assert "NameError" in json.loads((tmp_path / "unverified.json").read_text())["bad"]["printed"]

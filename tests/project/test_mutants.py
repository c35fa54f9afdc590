"""How `make mutants` reads decorators, and what it writes down."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from mutants.decorators import undecorated
from mutants.record import Mutant, Sample, faults, recorded
from mutants.record import update as update_all


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "survivors.md"


DECORATED = """
    import contextlib
    import functools
    def times(number): return lambda function: lambda *args: number * function(*args)
    class Both:
        @property
        def size(self): return 2
        @classmethod
        def made(cls): return cls()
    @times(5)
    @functools.cache
    def sum_of(a, b): return a + b
    @contextlib.contextmanager
    def inside(): yield Both.made().size
"""


def test_a_decorator_is_the_call_that_it_is() -> None:
    source = undecorated(dedent(DECORATED))
    assert [line.strip() for line in source.splitlines() if "@" in line] == ["@classmethod"]
    assert "sum_of = times(5)(functools.cache(sum_of))" in source
    names: dict[str, object] = {}
    exec(source + "with inside() as two: ten = sum_of(two, 0)", names)
    assert (names["two"], names["ten"]) == (2, 10)


def tried(*verdicts: str, module: str = "pkg.one") -> list[tuple[Mutant, str]]:
    """One mutant for each verdict: of the first number there are two that look the same."""
    changes = (f"return {max(n, 1)} → return None" for n in range(len(verdicts)))
    return [(Mutant(f"{module}.x_f__mutmut_{n}", x), y) for n, (x, y) in enumerate(zip(changes, verdicts, strict=True))]


def update(path: Path, run: list[tuple[Mutant, str]], *, size: int | None = None, **kind: Any) -> list[str]:
    """Write down a run of one module, of all its mutants unless there are more."""
    return update_all(path, run, {run[0][0].module: len(run) if size is None else size}, **kind)


def survivors(path: Path, reason: str) -> list[str]:
    rest = path.read_text().partition(f"## {reason}\n")[2]
    return rest.partition("```text\n")[2].partition("```")[0].splitlines()


def test_a_survivor_stays_under_its_reason_until_it_is_noticed(path: Path) -> None:
    few = ["killed"] * 97
    assert update(path, tried("survived", "survived", "unreached", *few)) == ["3 survivors have no reason"]
    one, two = "pkg.one.f: return 1 → return None", "pkg.one.f: return 2 → return None"
    assert survivors(path, "Not looked at") == [one, one, two]
    assert "| `pkg.one` | 100 | 100 | 97 | 97.0 % |" in path.read_text()

    path.write_text(path.read_text().replace("## Not looked at\n\n", "## Speed only\n\nNothing else.\n\n"))
    assert update(path, tried("survived", "survived", "unreached", "survived", *few)) == ["1 survivors have no reason"]
    assert survivors(path, "Speed only") == [one, one, two]
    assert survivors(path, "Not looked at") == ["pkg.one.f: return 3 → return None"]

    assert update(path, tried("survived", "killed", "late", "crashed", *few)) == []
    assert survivors(path, "Speed only") == [one]
    assert "Nothing else." in path.read_text()
    assert "Not looked at" not in path.read_text()


def test_a_part_leaves_the_record_of_the_others_alone(path: Path) -> None:
    update(path, tried("survived", "killed"))
    share = "50.0% of the mutants are noticed; it must be 95%"
    assert faults(path.read_text()) == [share, "1 survivors have no reason"]
    update(path, tried("killed", "survived", module="pkg.two"))
    new = [f"pkg.{module}.f: return 1 → return None" for module in ("one", "two")]
    assert survivors(path, "Not looked at") == new
    assert "| all | 4 | 4 | 2 | 50.0 % |" in path.read_text()
    update(path, tried("killed", "killed"))
    assert survivors(path, "Not looked at") == new[1:]


ONE, SOME = "pkg.one.f: return 1 → return None", tried("killed", "survived", "survived", "killed")
RUNS: dict[str, tuple[list[tuple[list[tuple[Mutant, str]], dict[str, Any]]], str]] = {
    "a sample": ([(SOME[1:], {"size": 40})], "| `pkg.one` | 40 | 3 | 1 | 33.3 % |"),
    "all, after a sample": ([(SOME[1:], {"size": 40}), (SOME[:2], {})], "| `pkg.one` | 2 | 2 | 1 | 50.0 % |"),
    "a sample, after all": ([(SOME[:2], {}), (SOME[:1], {"size": 2})], "| `pkg.one` | 2 | 2 | 1 | 50.0 % |"),
    "a sample leaves the survivors": ([(SOME[:2], {}), (SOME[:1], {"size": 2})], f"```text\n{ONE}\n```"),
    "suites": ([(SOME[:2], {"size": 40, "samples": {"core": Sample(5, 40, 2, 1), "layers": Sample(6, 9, 1, 1)}}),
                (SOME[:2], {"size": 40, "samples": {"core": Sample(7, 40, 2, 2)}}), (SOME[:1], {})],
               "| core | 7 | 40 | 2 | 2 |\n| layers | 6 | 9 | 1 | 1 |\n"),
    "a module in another": ([(tried("survived", module="pkg.one.two"), {}), (SOME[:1], {})],
                            "```text\npkg.one.two.f: return 1 → return None\n```"),
    "survivors alone": ([(SOME, {}), (tried("killed", "killed", "survived")[1:], {"size": 5, "again": True})],
                        "| `pkg.one` | 5 | 4 | 3 | 75.0 % |"),  # the fifth was not tried
    "survivors of a sample": ([(SOME, {"size": 50}),
                               (tried("killed", "killed", "survived")[1:], {"size": 50, "again": True})],
                              "| `pkg.one` | 50 | 4 | 3 | 75.0 % |"),
}  # fmt: skip


@pytest.mark.parametrize(("runs", "shown"), RUNS.values(), ids=RUNS)
def test_a_record_shows_what_several_runs_found(path: Path, runs: Any, shown: str) -> None:
    for run, kind in runs:
        update(path, run, **kind)
    assert shown in path.read_text()


def test_the_survivors_of_a_record_are_read_back(path: Path) -> None:
    update(path, SOME)
    assert recorded(path) == {mutant.line for mutant, _ in SOME[1:3]}

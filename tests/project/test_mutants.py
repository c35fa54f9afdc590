"""How `make mutants` reads decorators, and what it compares with the record."""

from textwrap import dedent

from mutants import __main__ as command
from mutants.decorators import undecorated
from mutants.record import Mutant, compared, recorded

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


def test_survivors_are_compared_with_the_record() -> None:
    text = "## Speed only\n\n```text\nm.f: a → b\nm.f: a → b\nm.f: c → d\n```\n\n## More\n\n```text\nm.f: e → f\n```\n"
    known = recorded(text)
    assert known == {"m.f: a → b": 2, "m.f: c → d": 1, "m.f: e → f": 1}
    verdicts = [
        ("a → b", "survived"),
        ("a → b", "unreached"),
        ("a → b", "survived"),
        ("c → d", "late"),
        ("g → h", "killed"),
    ]
    tried = [(Mutant(f"m.x_f__mutmut_{n}", change), verdict) for n, (change, verdict) in enumerate(verdicts)]
    assert compared(tried, known) == (["m.f: a → b"], ["m.f: c → d"])
    assert compared(tried[1:], known) == ([], ["m.f: c → d"])


def test_the_modules_and_tests_of_every_suite_exist() -> None:
    """As its import demands."""
    assert all(folders and tests for folders, tests in command.SUITES.values())

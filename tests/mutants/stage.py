"""A copy of the repository in which all mutants wait side by side, each to be switched on by its name."""

from __future__ import annotations

import difflib
import operator
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from mutmut.mutation.file_mutation import mutate_file_contents

from mutants import ROOT
from mutants.decorators import undecorated
from mutants.record import Mutant

COPIED = ("relskew_core", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "setup.py", "README.md")

SAME = (
    (r", strict=\w+|, (?=\))", ""),  # `zip(…, strict=True)` guards against mistakes in the code that is tested
    (r"\b(\w+)=None\b", r"\1=False"),  # of a boolean, which no caller sets to False
    (r"asarray\(\d\)\.dtype", ""),  # the default integer dtype
)
"""What makes two lines the same: mutants that change nothing else are not tried."""


def build(stage: Path, parts: Sequence[str]) -> list[Mutant]:
    """Copy everything, links followed, and put the mutants of the modules under some paths into the copy."""
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, stage / name)
    for name in ("backends", "export"):  # where some tests read sources
        (stage / name).symlink_to(Path("relskew_core", name))
    files = (file for part in parts for pattern in (f"{part}.py", f"{part}/**/*.py") for file in stage.glob(pattern))
    return [mutant for file in sorted(files) for mutant in _mutate(file, stage)]


def _mutate(file: Path, stage: Path) -> list[Mutant]:
    mutated = mutate_file_contents(str(file), undecorated(file.read_text()))
    file.write_text(mutated.code)
    name = ".".join(file.relative_to(stage).with_suffix("").parts)
    module, lines = name.removesuffix(".__init__"), mutated.code.splitlines()
    spans = mutated.line_span_by_function_name
    bodies = {
        name: [line.strip().replace(name, "…") for line in lines[span.start - 1 : span.end]]
        for name, span in spans.items()
    }
    found = []
    for name in mutated.mutant_names:
        whole = name.partition("__mutmut_")[0] + "__mutmut_orig"
        old, new = _sides(bodies[whole], bodies[name])
        if _normal(old) != _normal(new):
            same = [*map(operator.eq, bodies[whole], bodies[name]), False].index(False)
            start, end = spans[whole].start, spans[whole].end + 1
            found.append(Mutant(f"{module}.{name}", f"{old} → {new}", start + same, (start, end)))
    return found


def _sides(old: list[str], new: list[str]) -> tuple[str, str]:
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
    left, right = (" ".join(line[2:] for line in changed if line[0] == sign) for sign in "-+")
    return left, right


def _normal(line: str) -> str:
    for pattern, same in SAME:
        line = re.sub(pattern, same, line)
    return line

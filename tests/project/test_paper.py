"""The paper says what was measured: its figures stand in the pages that are written from the records."""

from __future__ import annotations

import re

import pytest

from tracked import ROOT

PAPER = (ROOT / "paper.md").read_text()
PAGES = "".join((ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "export.md"))


def test_every_citation_has_its_entry_and_every_entry_is_cited() -> None:
    cited = set(re.findall(r"@(\w+)", PAPER.partition("\n---\n")[2]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper.bib").read_text(), re.MULTILINE))


def figures() -> list[str]:
    section = PAPER.partition("# What was measured")[2].partition("\n# ")[0]
    return re.findall(r"\b[\d.]+ (?:ms|MiB)", section)


@pytest.mark.parametrize("figure", sorted(set(figures())))
def test_every_figure_was_measured(figure: str) -> None:
    number, unit = figure.split()
    shown = re.findall(rf"\b([\d.]+) {unit}\b", PAGES)
    assert any(number in (one, f"{float(one):.1f}") for one in shown), f"no page says {figure}"


def test_the_paper_has_figures() -> None:
    assert len(figures()) > 15

"""The paper says what was measured: its figures stand in the pages that are written from the records."""

import re

import pytest

from tracked import ROOT

PAPER = (ROOT / "paper.md").read_text()
PAGES = "".join(
    (ROOT / "docs" / name).read_text() for name in ("benchmarks.md", "graphs.md", "gpu.md", "development/gpu.md")
)


def test_every_citation_has_its_entry_and_every_entry_is_cited() -> None:
    cited = set(re.findall(r"@(\w+)", PAPER.partition("\n---\n")[2]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper.bib").read_text(), re.MULTILINE))


SECTION = PAPER.partition("# Research impact statement")[2].partition("\n# ")[0]
FIGURES = sorted(set(re.findall(r"\b[\d.]+ (?:ms|MiB)", SECTION)))


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_was_measured(figure: str) -> None:
    number, unit = figure.split()
    shown = re.findall(rf"\b([\d.]+) {unit}\b", PAGES)
    assert any(number in (one, f"{float(one):.1f}") for one in shown), f"no page says {figure}"


def test_every_ratio_was_measured() -> None:
    assert len(FIGURES) > 15
    ratios = re.findall(r"([\d.]+) times as long", " ".join(PAPER.split()))
    assert ratios
    assert all(f"({ratio}×)" in PAGES for ratio in ratios)


def test_the_paper_has_the_sections_and_the_length_that_its_journal_asks_for() -> None:
    body = PAPER.partition("\n---\n")[2]
    assert re.findall(r"^# (.*)$", body, re.MULTILINE) == [
        "Summary", "Statement of need", "State of the field", "Software design", "Research impact statement",
        "AI usage disclosure", "Acknowledgements", "References",
    ]  # fmt: skip
    assert 750 <= len(re.findall(r"[^\s|]+", body)) <= 1750


def test_the_paper_counts_families_as_the_page_does() -> None:
    page = (ROOT / "docs" / "huggingface.md").read_text().partition("## Families")[2].partition("## Limits")[0]
    assert "more than forty families" in PAPER
    assert len(re.findall(r"[\w-]+", "".join(re.findall(r"^\| ([^|]*)\|", page, re.MULTILINE)))) > 40

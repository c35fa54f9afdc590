"""Graphs, to the letter: names, shapes and doc strings are promises too, and a change of them must be meant."""

from __future__ import annotations

import pytest

from graph_text import FOLDER, WRITTEN, model_of, plans, text


@pytest.mark.parametrize("name", WRITTEN)
def test_graph(name: str) -> None:
    """``tests/support/graph_text.py`` writes them anew; what changed is to be read."""
    assert text(model_of(name)) == (FOLDER / f"{name}.txt").read_text()


def test_plans() -> None:
    assert plans() == (FOLDER / "plans.txt").read_text()


def test_no_other_graph_is_there() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*WRITTEN, "plans"}

"""Graphs, to the letter: names, shapes and doc strings are promises too, and a change of them must be meant."""

import numpy as np
import pytest

from graph_text import FOLDER, WRITTEN, model_of, plans, text
from relskew_core.export._nodes.emitter import Emitter


@pytest.mark.parametrize("name", WRITTEN)
def test_graph(name: str) -> None:
    """``tests/support/graph_text.py`` writes them anew; what changed is to be read."""
    assert text(model_of(name)) == (FOLDER / f"{name}.txt").read_text()


def test_no_two_tensors_have_one_name() -> None:
    """Also in branches and loops, in which outer names are visible."""
    g = Emitter(np.dtype(np.float32))
    x = g.input("x", ("n",), "numbers")
    g.compute("Abs", [x], "twice", x.shape)
    for inner in (g, Emitter(g.dtype, g)):
        with pytest.raises(ValueError, match="two tensors of the graph would be called 'relskew/compute/twice'"):
            inner.compute("Abs", [x], "twice", x.shape)
    Emitter(g.dtype, g, "branch/").compute("Abs", [x], "twice", x.shape)


def test_plans() -> None:
    assert plans() == (FOLDER / "plans.txt").read_text()


def test_no_other_graph_is_there() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*WRITTEN, "plans", "trials"}

"""Tables that are made or changed: sinusoids and interpolation."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from libraries import GATES, Library
from oracles import relative_error
from relskew_core import Span, resize_table, sinusoidal_table


@pytest.mark.parametrize("direction", ["past", "future", "both"])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_sinusoids_are_the_formula(order: Any, direction: Any) -> None:
    span = Span(30, 3000)
    table = sinusoidal_table(span, 6, xp=np, dtype=np.float64, order=order, direction=direction, base=100.0)
    for r in (-30, -7, 0, 1, 2999):
        for k in range(3):
            angle = {"past": -r, "future": r, "both": abs(r)}[direction] / 100.0 ** (2 * k / 6)
            places = (k, 3 + k) if order == "halves" else (2 * k, 2 * k + 1)
            assert table[r + 30, places[0]] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[r + 30, places[1]] == pytest.approx(math.cos(angle), abs=1e-12)


def test_two_sines_are_enough_and_zero_has_no_sign() -> None:
    table = sinusoidal_table(Span(1, 1), 2, xp=np, dtype=np.float64)
    np.testing.assert_array_equal(table[1], [0.0, 1.0])
    assert not np.signbit(table[1]).any()


def test_sinusoids_in_every_library(library: Library) -> None:
    xp = library.namespace()
    table = sinusoidal_table(Span(4, 4000), 8, xp=xp, dtype=xp.float32)
    assert str(table.dtype).endswith("float32")
    want = sinusoidal_table(Span(4, 4000), 8, xp=np, dtype=np.float64)
    rows = np.asarray(table.get() if hasattr(table, "get") else table)
    assert relative_error(rows, want) < 1e-7  # large angles are not rounded before the sine


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("method", "old", "new"), [
    *(("linear", *rows) for rows in ((5, 9), (9, 5), (3, 3), (1, 4), (4, 1), (5, 2), (7, 100))),
    *(("cubic", *rows) for rows in ((5, 9), (9, 5), (7, 7), (13, 4), (1, 3), (2, 7))),
])  # fmt: skip
def test_resizing_is_torchs(library: Library, method: str, old: int, new: int, align_corners: bool) -> None:
    table = torch.randn(2, old, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if method == "linear":
        want = torch.nn.functional.interpolate(table.mT, size=new, mode="linear", align_corners=align_corners).mT
    else:
        size: dict[str, Any] = {"size": (new, 3), "mode": "bicubic", "align_corners": align_corners}
        want = torch.nn.functional.interpolate(table[:, None], **size)[:, 0]
    for dtype in library.dtypes_of(new):
        given = {"table": library.asarray(table.numpy(), dtype)}
        got = library.call(resize_table, given, rows=new, method=method, align_corners=align_corners)
        assert str(got.dtype).endswith(dtype)
        assert relative_error(library.to_numpy(got), want) < GATES[dtype]


def test_resizing_any_axis_and_its_gradient() -> None:
    bias = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = torch.nn.functional.interpolate(bias[None], size=(9, 3), mode="bilinear", align_corners=False)[0]
    got = resize_table(resize_table(bias, 9), 3, axis=-1)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(lambda x: resize_table(x, 9, axis=1), [bias])
    column = resize_table(bias[0, :, 0].detach(), 9, method="cubic", axis=0)
    torch.testing.assert_close(column, resize_table(bias[0].detach(), 9, method="cubic")[:, 0])
    assert resize_table(np.arange(3.0), 5, axis=0, align_corners=True).tolist() == [0, 0.5, 1, 1.5, 2]

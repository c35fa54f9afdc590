"""Drop-ins keep what varies in a program of torch.export: batch, length and the length of a past."""

import pytest
import torch
from huggingface import stand_ins
from huggingface.stand_ins import HEADS, LENGTH, STAND_INS, Cache, D, E, x
from torch import Tensor, nn

from relskew_core.huggingface import replace_attention

ROWS = 2 * LENGTH - 1


class Encoding(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *states: Tensor) -> Tensor:
        out: Tensor = self.attention(*states)[0]
        return out


class WithPast(Encoding):
    def forward(self, *states: Tensor) -> Tensor:
        out: Tensor = self.attention(states[0], cache=Cache(*states[1:]))[0]
        return out


WITH_WINDOWS: dict[str, tuple[tuple[Tensor, ...], list[tuple[int, ...]]]] = {
    "wavlm": ((x(), torch.ones(2, LENGTH).long()), [(0, 1), (0, 1)]),
    "parakeet": ((x(), x(2, ROWS, E)), [(0, 1), (0, 1)]),
    "wav2vec2": ((x(), x(2, 1, 1, LENGTH), x(1, ROWS, E)), [(0, 1), (0, 3), (1,)]),
}
"""Inputs, and their axes that vary."""
CASES = WITH_WINDOWS | {
    "mpt": ((x(), torch.arange(1.0 - LENGTH, 1.0) / 8 * x(HEADS, 1, 1)), [(0, 1), (2,)]),
    "bloom": ((x(), x(), x(2 * HEADS, 1, LENGTH), x(2, 1, 1, LENGTH)), [(0, 1), (0, 1), (0, 2), (0, 3)]),
    "granite": ((x(),), [(0, 1)]),
    "sam": ((x(2, 3, 4, E),), [(0, 1, 2)]),
    "vitdet": ((x(2, 3, 4, E),), [(0, 1, 2)]),
    "a table of its own": ((x(4, LENGTH, E),), [(0,)]),
    "with a past": ((x(2, 3, E), x(2, HEADS, 5, D), x(2, HEADS, 5, D)), [(0, 1), (0, 2), (0, 2)]),
}


@pytest.mark.parametrize(("name", "window"), [*((x, None) for x in CASES), *((x, (2, 1)) for x in WITH_WINDOWS)])
def test_what_varies(name: str, window: tuple[int, int] | None) -> None:
    if name == "with a past":
        model: nn.Module = WithPast(stand_ins.t5("UMT5Attention", is_decoder=True, is_causal=True))
    else:
        model = Encoding(STAND_INS[name][0]())
    replace_attention(model, window=window).eval()
    arguments, vary = CASES[name]
    dims = tuple({i: torch.export.Dim.AUTO for i, size in enumerate(given.shape) if size > 1} for given in arguments)
    program = torch.export.export(model, arguments, dynamic_shapes=(dims,))
    given = set(program.graph_signature.user_inputs)
    sizes = [node.meta["val"].shape for node in program.graph.nodes if node.name in given]
    fixed = [[axis for axis in axes if isinstance(shape[axis], int)] for axes, shape in zip(vary, sizes, strict=True)]
    assert not any(fixed)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*arguments), model(*arguments))


@pytest.mark.parametrize("name", ["mpnet", "beit", "vitdet", "a table of its own", "granite"])
@torch.no_grad()
def test_compiled_drop_ins_give_the_same_numbers(name: str) -> None:
    """torch.compile traces them."""
    make, call = STAND_INS[name]
    ours = replace_attention(make()).eval()
    torch.testing.assert_close(torch.compile(lambda: call(ours), backend="eager")(), call(ours))

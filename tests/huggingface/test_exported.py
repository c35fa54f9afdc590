"""Drop-ins keep what varies in a program of torch.export: batch, length and the length of a past."""

from typing import Any

import pytest
import torch
from huggingface import stand_ins
from huggingface.stand_ins import HEADS, LENGTH, STAND_INS, Cache, D, E, x
from torch import Tensor, nn

from relskew_core.huggingface import replace_attention

ROWS = 2 * LENGTH - 1


class WithPast(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out: Tensor = self.attention(states, cache=Cache(keys, values))[0]
        return out


class Encoding(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *states: Tensor) -> Tensor:
        out: Tensor = self.attention(*states)[0]
        return out


def decoder() -> Any:
    made = stand_ins.umt5()
    made.is_decoder = made.is_causal = True
    return made


MODELS: dict[str, tuple[Any, type[nn.Module], tuple[Tensor, ...], list[tuple[int, ...]]]] = {
    "wavlm": (stand_ins.wavlm, Encoding, (x(), torch.ones(2, LENGTH).long()), [(0, 1), (0, 1)]),
    "parakeet": (stand_ins.parakeet, Encoding, (x(), x(2, ROWS, E)), [(0, 1), (0, 1)]),
    "wav2vec2": (
        lambda: stand_ins.conformer("Wav2Vec2ConformerSelfAttention"), Encoding,
        (x(), x(2, 1, 1, LENGTH), x(1, ROWS, E)), [(0, 1), (0, 3), (1,)]
    ),
    "mpt": (stand_ins.mpt, Encoding, (x(), torch.arange(1.0 - LENGTH, 1.0) / 8 * x(HEADS, 1, 1)), [(0, 1), (2,)]),
    "bloom": (
        stand_ins.bloom, Encoding, (x(), x(), x(2 * HEADS, 1, LENGTH), x(2, 1, 1, LENGTH)),
        [(0, 1), (0, 1), (0, 2), (0, 3)],
    ),
    "granite": (stand_ins.granite, Encoding, (x(),), [(0, 1)]),
    "sam": (lambda: stand_ins.sam("SamVisionAttention"), Encoding, (x(2, 3, 4, E),), [(0, 1, 2)]),
    "vitdet": (lambda: stand_ins.sam("VitDetAttention"), Encoding, (x(2, 3, 4, E),), [(0, 1, 2)]),
    "a table of its own": (stand_ins.swin_itself, Encoding, (x(4, LENGTH, E),), [(0,)]),
    "umt5": (decoder, WithPast, (x(2, 3, E), x(2, HEADS, 5, D), x(2, HEADS, 5, D)), [(0, 1), (0, 2), (0, 2)]),
}  # fmt: skip


REFUSING = ("mpt", "bloom", "granite", "sam", "vitdet", "a table of its own")


@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_what_varies(name: str, window: tuple[int, int] | None) -> None:
    make, kind, arguments, vary = MODELS[name]
    if window is not None and (kind is WithPast or name in REFUSING):
        pytest.skip("it has no window")
    model = kind(replace_attention(make(), window=window)).eval()
    auto = torch.export.Dim.AUTO
    dims = tuple({axis: auto for axis, size in enumerate(argument.shape) if size > 1} for argument in arguments)
    shapes: Any = dims if kind is WithPast else (dims,)
    program = torch.export.export(model, arguments, dynamic_shapes=shapes)
    given = set(program.graph_signature.user_inputs)
    sizes = [node.meta["val"].shape for node in program.graph.nodes if node.name in given]
    fixed = [[axis for axis in axes if isinstance(shape[axis], int)] for axes, shape in zip(vary, sizes, strict=True)]
    assert not any(fixed)
    with torch.no_grad():
        want = model(*arguments)
        torch.testing.assert_close(program.module()(*arguments), want)


@pytest.mark.parametrize("name", ["mpnet", "vitdet", "a table of its own", "granite"])
@torch.no_grad()
def test_compiled_drop_ins_give_the_same_numbers(name: str) -> None:
    """torch.compile traces them."""
    make, call = STAND_INS[name]
    ours = replace_attention(make()).eval()
    torch.testing.assert_close(torch.compile(lambda: call(ours), backend="eager")(), call(ours))

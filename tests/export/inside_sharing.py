"""What layers of a model share in its graph, compared with the same graph in which every layer computes its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onnx_sessions import opened
from relskew_core import Span, relative_attention
from relskew_core.export import torch_to_onnx
from relskew_core.export._models import convert
from torch_exports import assert_same, of, random

FAR = Span(6, 6, "clip")


@pytest.mark.parametrize("chunk_size", ["auto", None])
def test_layers_compute_once_what_they_share(chunk_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as from nodes in each layer, for few queries and for many, and of rows that see no key."""

    def forward(self: Any, x: Any, shown: Any) -> Any:
        hidden = torch.where(shown[:, None, None], 0.0, -torch.inf)
        for _ in range(3):
            x = x + relative_attention(x, x, x, rel_bias=self.bias, span=FAR, mask=hidden)
            x = x + relative_attention(x, x, x, mask=hidden)
        return x

    def shown(batch: int, length: int) -> Tensor:
        return torch.arange(length) < torch.arange(batch)[:, None] * 3

    def pads(made: Any) -> int:
        first = [one.attribute[0].g for one in made.graph.node if one.op_type == "If"]
        return sum(node.op_type == "Pad" for graph in (made.graph, *first) for node in graph.node)

    model = of(forward, bias=random(2, 13)).eval()
    given = {"x": random(2, 2, 9, 4), "shown": shown(2, 9)}
    made = torch_to_onnx(model, given, chunk_size=chunk_size, check=False)
    monkeypatch.setattr(convert, "share", lambda model: None)
    before = torch_to_onnx(model, given, chunk_size=chunk_size, check=False)
    assert (pads(made), pads(before)) == (1, 3)
    runs = opened(made), opened(before)
    for batch, length in [(1, 1), (3, 7), (2, 300), (2, 1100)]:
        feeds = {"x": random(batch, 2, length, 4).numpy(), "shown": shown(batch, length).numpy()}
        one, other = (run.run(None, feeds)[0] for run in runs)
        assert one.tobytes() == other.tobytes()
        assert_same([one], model, *map(torch.from_numpy, feeds.values()), gate=1e-5)


def test_what_one_branch_has_is_no_buffer_of_the_other() -> None:
    """The declared shape of a shared value must not be that of a later one: runtimes then use its memory again."""

    def forward(self: Any, x: Any) -> Any:
        for _ in range(3):
            q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (x, x / 2, x / 3))
            x = relative_attention(q, k, v, self.rel_k, FAR, rel_v=self.rel_v).transpose(1, 2).flatten(2)
        return x

    model = of(forward, rel_k=random(13, 4), rel_v=random(13, 4)).eval()
    made = torch_to_onnx(model, random(2, 9, 8), check=False)
    assert any(len(node.output) > 1 for node in made.graph.node if node.op_type == "If")
    for length in (5, 300, 1100):
        x = random(1, length, 8)
        assert_same(opened(made).run(None, {"x": x.numpy()}), model, x, gate=1e-5)

"""The module inside models: with wrapped, replaced, counted or split parts."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layers.modules import SPECS, dense_module, inputs, made
from torch import Tensor, nn
from torch.nn.utils import prune

from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import ConformerAttention, MultiheadAttention, RelativeMultiheadAttention
from relskew_core.layers.torch.parallel import TableParallel
from split.notices import without_notices
from torch_modules import of


def test_hooks_fire_once_for_every_projection() -> None:
    module = made(SPECS["cross"])
    fired: list[str] = []
    for name, projection in module.named_children():
        projection.register_forward_hook(lambda *_, name=name: fired.append(name))
    module(*inputs(module.spec))
    assert sorted(fired) == ["k_proj", "out_proj", "q_proj", "v_proj"]


@pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in a future PyTorch release:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_dynamic_quantization() -> None:
    module = RelativeMultiheadAttention(SPECS["causal"]).eval()
    (x,) = inputs(module.spec, dtype=torch.float32)
    quantized: Any = torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    assert type(quantized.q_proj) is not nn.Linear
    torch.testing.assert_close(quantized(x), dense_module(quantized, x))
    assert 0 < (quantized(x) - module(x)).norm() < 0.1 * module(x).norm()
    y, _ = quantized(x, past=quantized.empty_cache(2, length=16))
    torch.testing.assert_close(y, quantized(x))


@pytest.mark.parametrize("pruned", [True, False], ids=["pruned", "parametrised"])
def test_weights_that_are_computed_take_part(pruned: bool) -> None:
    module = made(SPECS["causal"])
    (x,) = inputs(module.spec)
    before, computed = module(x), [(module.get_submodule("q_proj"), "weight"), (module, "rel_k")]
    for owner, name in computed:
        if pruned:
            prune.l1_unstructured(owner, name, amount=0.5)
        else:
            nn.utils.parametrize.register_parametrization(owner, name, of(lambda self, weight: 2 * weight))
    y = module(x)
    assert not torch.allclose(y, before)
    torch.testing.assert_close(y, dense_module(module, x), rtol=0, atol=1e-12)
    for owner, name in computed:
        if pruned:
            assert getattr(owner, name).count_nonzero() == getattr(owner, name).numel() // 2
            prune.remove(owner, name)
        else:
            nn.utils.parametrize.remove_parametrizations(owner, name)
    torch.testing.assert_close(module(x), y, rtol=0, atol=1e-12)


def test_a_projection_that_makes_no_whole_heads_is_named() -> None:
    module = made(SPECS["causal"])
    module.k_proj = nn.Linear(8, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`k_proj` must return heads of width 4, got Tensor of dtype .* \(2, 9, 6\)"):
        module(*inputs(module.spec))


# Tables


def test_tables_are_parameters_of_their_own() -> None:
    module = made(SPECS["bidirectional"])
    assert [id(x) for x in module.table_parameters()] == [id(module.rel_k), id(module.rel_v)]
    nn.utils.parametrize.register_parametrization(module, "rel_v", nn.Identity())
    prune.identity(module, "rel_k")
    assert [x.shape for x in module.table_parameters()] == [(2, 7, 4)] * 2
    assert {id(x) for x in module.table_parameters()} <= {id(x) for x in module.parameters()}


def test_tables_may_stay_in_single_precision() -> None:
    module = RelativeMultiheadAttention(SPECS["bidirectional"]).bfloat16()
    (x,) = inputs(module.spec, dtype=torch.bfloat16)
    expected = module(x)
    for name in ("rel_k", "rel_v"):
        setattr(module, name, nn.Parameter(module.get_parameter(name).detach().float()))
    y = module(x)
    assert torch.equal(y, expected)
    gradients = torch.autograd.grad(y.float().sin().sum(), module.table_parameters())
    assert [x.dtype for x in gradients] == [torch.float32] * 2
    assert all(x.any() for x in gradients)


# The rest of the call


def test_options_reach_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made(SPECS["causal"], impl="portable", chunk_size=2)
    (x,) = inputs(module.spec)
    seen: dict[str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.update(options)
        return v

    monkeypatch.setattr("relskew_core._block.module.relative_attention", attend)
    module(x, offset=3)
    assert (seen["impl"], seen["chunk_size"], seen["offset"]) == ("portable", 2, 3)
    assert "impl='portable', chunk_size=2" in repr(module)
    with pytest.raises(ValueError, match="`impl` must be one of"):
        RelativeMultiheadAttention(module.spec, impl="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`chunk_size` must be an int >= 1"):
        RelativeMultiheadAttention(module.spec, chunk_size=0)


@pytest.mark.parametrize("offset", [[2, 0], torch.tensor([2, 0])], ids=["list", "tensor"])
def test_every_item_may_have_an_offset(offset: Any) -> None:
    module = made(BlockSpec(8, 2, Span.clipped(3), cross=True, causal=True, rel_values=True))
    x, memory = inputs(module.spec, n=4)
    expected = [dense_module(module, x[i : i + 1], memory[i : i + 1], offset=int(offset[i])) for i in range(2)]
    torch.testing.assert_close(module(x, memory, offset=offset), torch.cat(expected), rtol=0, atol=1e-12)
    assert not torch.allclose(module(x, memory), module(x, memory, offset=2))


# Nested tensors


def nested(layout: torch.layout, *lengths: int) -> Tensor:
    items = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in lengths]
    return torch.nested.as_nested_tensor(items, layout=layout).requires_grad_()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.parametrize("name", ["causal", "cross"])
def test_nested_tensors_are_attended_to_item_by_item(name: str, layout: torch.layout) -> None:
    module = made(SPECS[name])
    given = [nested(layout, 3, 5)] + [nested(layout, 4, 2)] * module.spec.cross
    y = module(*given)
    assert y.layout == layout
    items = list(zip(*(x.unbind() for x in given), strict=True))
    for actual, item in zip(y.unbind(), items, strict=True):
        torch.testing.assert_close(actual, dense_module(module, *(x[None] for x in item))[0], rtol=0, atol=1e-12)
    total = given[0] + y  # with the same offsets
    loss: Any = sum(x.sin().sum() for x in total.unbind())
    (gradient,) = torch.autograd.grad(loss, given[0])
    assert all(x.any() for x in gradient.unbind())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_may_be_parts_of_longer_rows() -> None:
    module, rows = made(SPECS["causal"]), nested(torch.strided, 6, 6).detach().to_padded_tensor(0.0)
    part = torch.nested.narrow(rows, 1, torch.tensor([1, 2]), torch.tensor([3, 4]), layout=torch.jagged)
    for actual, item in zip(module(part).unbind(), (rows[0, 1:4], rows[1, 2:6]), strict=True):
        torch.testing.assert_close(actual, dense_module(module, item[None])[0], rtol=0, atol=1e-12)


def test_what_nested_tensors_exclude_is_named() -> None:
    module = made(SPECS["causal"])
    x = nested(torch.jagged, 3, 5)
    for name, value in {"past": module.empty_cache(2), "mask": torch.ones(5, 5), "offset": 1}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be None for nested tensors"):
            module(x, **{name: value})  # type: ignore[call-overload]
    cross = made(SPECS["cross"])
    with pytest.raises(TypeError, match="`memory` must be a nested tensor because another input is one"):
        cross(x, torch.zeros(2, 5, 8, dtype=torch.float64))


# Shards


def test_tensor_parallelism_and_fsdp_in_two_processes(tmp_path: Path) -> None:
    """Outputs, gradients and caches of torch's own plans equal those of one process, grouped queries too."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("shards.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "store"), "2"]
    run = partial(subprocess.Popen, env=environment, stdout=subprocess.PIPE, text=True)
    ranks = [run([*command, rank]) for rank in "01"]
    told = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert [without_notices(out) for out in told] == ["12 ways agree\n"] * 2


def test_heads_without_their_tables_are_named() -> None:
    module = made(SPECS["causal"])
    for name in ("q_proj", "k_proj", "v_proj"):  # the shards of a process
        setattr(module, name, nn.Linear(8, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`rel_k` must be sharded like the heads, of which 1 of 2 are here.*Tab"):
        module(*inputs(module.spec))
    with pytest.raises(TypeError, match="`TableParallel` is for a RelativeMultiheadAttention, got Linear"):
        TableParallel()._apply(nn.Linear(1, 1), None)  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[], Any]] = {
    "RelativeMultiheadAttention": lambda: RelativeMultiheadAttention(BlockSpec.t5(8, 2)),
    "MultiheadAttention": lambda: MultiheadAttention(8, 2, Span.clipped(3), batch_first=True),
    "ConformerAttention": lambda: ConformerAttention(BlockSpec(8, 2, Span.full(9))),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_modules_stay_whole_in_torch_fx(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = x.relu()
        return self.layer(y, y, value=y)[0] if name == "MultiheadAttention" else self.layer(y)

    layer = LAYERS[name]()
    model = of(forward, layer=layer)
    traced = torch.fx.symbolic_trace(model)
    assert traced.layer is layer
    for length in (5, 9):
        x = torch.randn(2, length, 8, dtype=torch.float32)
        torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(TypeError, match=rf"^torch\.jit\.script cannot compile {name}: use torch\.compile"):
        torch.jit.script(layer)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_worker_with_one_thread() -> None:
    """After a parent with several threads, as docs/other-tools.md says; with several, torch itself waits forever."""
    script = """
        import os
        import torch
        from relskew_core import BlockSpec
        from relskew_core.layers.torch import RelativeMultiheadAttention

        torch.set_num_threads(2)
        layer = RelativeMultiheadAttention(BlockSpec.t5(64, 4)).eval()
        x = torch.randn(4, 300, 64)
        expected = layer(x).detach()
        if not (child := os.fork()):
            torch.set_num_threads(1)
            os._exit(0 if torch.allclose(layer(x), expected, atol=1e-5) else 3)
        assert os.waitpid(child, 0)[1] == 0
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

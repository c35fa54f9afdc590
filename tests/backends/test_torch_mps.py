"""On Apple's GPUs torch runs the portable code: its operators have kernels there, and nothing is made in float64.

Tensors on ``meta`` take the place of those on such a device: both are neither on CPUs nor on CUDA devices, so
their calls go the same way. torch's own list says what has kernels.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layers.modules import SPECS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dense
from relskew_core import (
    BlockSpec,
    Span,
    relative_attention,
    relative_attention_2d,
    relative_attention_vjp,
    sinusoidal_table,
)
from relskew_core.layers.torch import ConformerAttention, MultiheadAttention, RelativeMultiheadAttention

torchgen = pytest.importorskip("torchgen")
yaml = pytest.importorskip("yaml")

COMPOSITE = {"CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


@functools.cache
def listed() -> dict[str, dict[str, Any]]:
    """Return what this release of torch says of its operators, by name and overload."""
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {entry["func"].partition("(")[0]: entry for entry in entries}


def has_kernel(name: str) -> bool:
    """Whether an operator has a kernel for these devices, or is made of others that have."""
    entry = listed()[listed()[name].get("structured_delegate", name)]
    keys = {key for each in entry.get("dispatch", COMPOSITE) for key in each.split(", ")}
    first = name.partition(".")[0]
    of_others = [other for other in (f"_{first}", f"_{first}_helper") if other in listed()]
    return "MPS" in keys or (bool(keys & COMPOSITE) and all(map(has_kernel, of_others)))


class Recorder(TorchDispatchMode):
    """Record the operators that work there; a result in float64 is an error, as it is in torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch declares no types there
        self.operators: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        there = [
            x for x in tensors if (x.is_meta or x.is_mps) and x.numel()
        ]  # those on meta in the library itself are empty
        assert not [x for x in there if x.dtype in (torch.float64, torch.complex128)], func
        if there:
            self.operators.add(func)
        return found

    def missing(self) -> list[str]:
        """Name the operators without a kernel."""
        names = []
        for each in self.operators:
            library, _, name = each.name().partition("::")
            own = library != "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
                each.name(), "CompositeExplicitAutograd"
            )
            if not own and not has_kernel(name):
                names.append(each.name())
        return sorted(names)


def missing_of(call: Callable[[], Any], *, default: bool = False) -> list[str]:
    """Return what a call and the gradients of its results lack; ``default`` makes new tensors there, too."""
    with torch.device("meta" if default else "cpu"), Recorder() as recorder:
        results = [x for x in tree_leaves(call()) if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    assert recorder.operators
    return recorder.missing()


def there(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)


def test_what_torch_lacks_is_noticed() -> None:
    turn = functools.partial(torch.ormqr, there(3, 3).detach(), there(3).detach(), there(3, 3))
    assert missing_of(turn) == ["aten::ormqr"]
    with pytest.raises(AssertionError, match="_to_copy"):
        missing_of(lambda: there(3).double())


@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_calls_and_their_gradients_need_no_more_than_there_is(case: dense.Case) -> None:
    def like(x: Any) -> Tensor:
        dtype = {"f": torch.float32, "b": torch.bool}.get(x.dtype.kind, torch.int64)
        return there(*x.shape, dtype=dtype)

    def call() -> Any:
        return relative_attention(**{name: dense.each(like, x) for name, x in case.arrays().items()}, **case.call())

    assert missing_of(call) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_long_calls_in_half_precision_need_no_more(dtype: torch.dtype) -> None:
    def call() -> Any:
        q, k, v = (there(2, 8, 3000, 64, dtype=dtype) for _ in range(3))
        tables = [there(301, 64, dtype=dtype) for _ in range(2)]
        more: dict[str, Any] = {"rel_v": tables[1], "causal": True, "dropout": 0.1, "seed": 3}
        return relative_attention(q, k, v, tables[0], Span.clipped(150), **more)

    assert missing_of(call) == []


def test_grids_and_gradients_without_autograd_need_no_more() -> None:
    def on_a_grid() -> Any:
        q, k, v = (there(2, 4, 48, 16) for _ in range(3))
        return relative_attention_2d(q, k, v, there(11, 16), there(15, 16), q_grid=(6, 8), k_grid=(6, 8))

    def pulled_back() -> Any:
        d_out, q, k, v = (there(2, 4, 48, 16).detach() for _ in range(4))
        return relative_attention_vjp(d_out, q, k, v, there(7, 16).detach(), Span.clipped(3))

    assert missing_of(on_a_grid) == []
    assert missing_of(pulled_back) == []


@pytest.mark.parametrize("name", SPECS)
def test_modules_need_no_more(name: str) -> None:
    """New tensors are there as well, as after ``torch.set_default_device``."""
    spec = SPECS[name]

    def call() -> Any:
        module = RelativeMultiheadAttention(spec, dropout=0.1)
        return module(there(2, 9, spec.embed_dim), *([there(2, 7, spec.embed_dim)] if spec.cross else []))

    assert missing_of(call, default=True) == []


def test_modules_of_other_kinds_need_no_more() -> None:
    def as_in_torch() -> Any:
        module, x = MultiheadAttention(16, 2, Span.clipped(16), batch_first=True), there(2, 9, 16)
        return module(x, x, x, is_causal=True)

    def with_sinusoids() -> Any:
        return ConformerAttention(BlockSpec(16, 2, Span.full(9)))(there(2, 9, 16))

    assert missing_of(as_in_torch, default=True) == []
    assert missing_of(with_sinusoids, default=True) == []


def test_sinusoids_of_a_traced_length_need_no_more() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    varies: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    length: Any = mode.from_tensor(torch.ones(5), symbolic_context=varies).shape[0]
    with mode, torch.device("mps"), Recorder() as recorder:
        made: Any = sinusoidal_table(Span.full(length), 4, xp=torch)
    assert (made.device.type, made.dtype, recorder.missing()) == ("mps", torch.float32, [])

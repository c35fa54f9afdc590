"""The shared part of all modules: tables and options, tensors of a call, and the call of attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, ClassVar, NoReturn

import array_api_compat.torch as xp
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from relskew_core._array.checks import describe
from relskew_core._array.namespace import is_floating
from relskew_core._array.typing import Impl, Namespace
from relskew_core._block.module import Attends, Settings
from relskew_core._block.spec import ATTENDED, TABLES, BlockSpec
from relskew_core._block.weights import with_bias
from relskew_core._functions.buckets import alibi_slopes, t5_buckets
from relskew_core._functions.tables import Direction, sinusoid_rates, sinusoids
from relskew_core._positions.span import Span
from relskew_core.backends._torch.transformations import is_transformed


class Whole(nn.Module):
    """A module that ``torch.fx`` calls as one node, as it does torch's own, and that ``torch.jit.script`` refuses."""

    def _call_impl(self, *given: Any, **named: Any) -> Any:
        for x in (*given, *named.values()):
            if isinstance(x, fx.Proxy):
                tracer: Any = x.tracer
                return tracer.create_proxy("call_module", tracer.path_of_module(self), given, named)
        return super()._call_impl(*given, **named)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}: use torch.compile, torch.export.export or "
            "torch.jit.trace"
        )


Function = Callable[..., Tensor]


def kept(most: int) -> Callable[[Function], Function]:
    """Make a function keep its last results, but none that a transformation or a mode of torch takes part in.

    Such tensors may be fake or functional, and have no numbers for later calls.
    """

    def decorate(make: Function) -> Function:
        found: dict[Hashable, Tensor] = {}

        @wraps(make)
        def call(*key: Any) -> Tensor:
            if is_transformed():
                return make(*key)
            made = found.get(key)
            if made is None:
                with torch.inference_mode(False), torch.no_grad():  # training may use it next
                    made = make(*key)
                if type(made) is not Tensor:
                    return made
                if len(found) >= most:
                    found.clear()
                found[key] = made
            return made

        return call

    return decorate


@kept(64)
def buckets(
    left: int, right: int, num_buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    rows = t5_buckets(
        Span(left, right), num_buckets=num_buckets, max_distance=max_distance, bidirectional=bidirectional
    )
    return torch.tensor(rows, dtype=torch.int64, device=device)


@kept(64)
def slopes(num_heads: int, first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(alibi_slopes(num_heads)[first : first + count], dtype=dtype, device=device)


@kept(4)
def rows_of_sinusoids(span: Span, dim: int, direction: Direction, dtype: torch.dtype, device: torch.device) -> Tensor:
    rates, host = sinusoid_rates(dim, base=10000.0), torch.device("cpu")  # Apple's GPUs have no float64
    rows = sinusoids(span, rates, "interleaved", direction, xp=xp, dtype=torch.float64, where=host)
    return rows.to(device=device, dtype=dtype)


class TableAttention(Attends, Whole):
    xp: ClassVar[Namespace] = xp

    rel_k: nn.Parameter  # None without `spec.rel_keys`
    rel_v: nn.Parameter | None
    rel_bias: nn.Parameter | None
    sinks: nn.Parameter | None
    impl: Impl

    processes = 1
    """The number of processes that share the heads, which ``TableParallel`` sets."""
    rank = 0
    """The number of this process among them."""

    def __init__(
        self, spec: BlockSpec, *, dropout: float, impl: Impl, chunk_size: int | None, device: Any, dtype: Any
    ) -> None:
        _check_placed(device, dtype)
        super().__init__()
        self.spec = spec
        self.dropout, self.impl, self.chunk_size = Settings.of(spec, dropout, impl, chunk_size)
        shapes = spec.weight_shapes(projections=False)
        for name in ATTENDED:
            empty = torch.empty(shapes[name], device=device, dtype=dtype) if name in shapes else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any, **more: Any) -> None:
        """Make tensors of NumPy's arrays, such as those of an ONNX file, for the projections too."""
        for key, x in state_dict.items():
            if key.startswith(prefix) and type(x).__module__ == "numpy":
                state_dict[key] = torch.from_numpy(x.copy())  # of negative strides, too
        if f"{prefix}in_proj_weight" in state_dict and not hasattr(self, "in_proj_weight"):
            options[-1].append("weights of torch.nn.MultiheadAttention are read by `from_multihead`")
        super()._load_from_state_dict(state_dict, prefix, *options, **more)

    def extra_repr(self) -> str:
        return ", ".join(self.spec.chosen() + self.settings.chosen())

    @property
    def settings(self) -> Settings:
        return Settings(self.dropout, self.impl, self.chunk_size)

    def dropped(self, x: Tensor) -> dict[str, Any]:
        if not (self.training and self.dropout):
            return {}
        return {"dropout": self.dropout, "seed": torch.randint(2**31, (), dtype=torch.int64, device=x.device)}

    def table_parameters(self) -> list[nn.Parameter]:
        """Return the tables' parameters, which should have about ten times the learning rate of the others.

        Every token updates every weight of a projection, but only the pairs at its distance update a row of a table: at
        the common rate tables lag behind. ``docs/torch.md`` has the numbers.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import BlockSpec, Span
        >>> from relskew_core.layers.torch import RelativeMultiheadAttention
        >>> attention = RelativeMultiheadAttention(BlockSpec(16, 4, Span.clipped(8)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 16), attention)
        >>> parts = [x for x in model.modules() if hasattr(x, "table_parameters")]
        >>> tables = [table for part in parts for table in part.table_parameters()]
        >>> others = [x for x in model.parameters() if all(x is not table for table in tables)]
        >>> groups = [{"params": others}, {"params": tables, "lr": 1e-2}]
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [10, 1]
        """
        names = tuple(f"{prefix}{name}" for name in TABLES for prefix in ("", "parametrizations."))
        return [x for name, x in self.named_parameters() if name.startswith(names)]

    def with_bias(self, q: Tensor, k: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
        spec, fixed = self.spec, {}
        if spec.rel_bias == "t5":
            reach = (spec.span.left, spec.span.right)
            fixed["buckets"] = buckets(*reach, spec.num_buckets, spec.max_distance, not spec.causal, q.device)
        elif spec.rel_bias == "alibi":
            here = spec.num_heads // self.processes
            fixed["slopes"] = slopes(spec.num_heads, self.rank * here, here, q.dtype, q.device)
            _check_heads("slopes", fixed["slopes"], q, here)
        return with_bias(self.tables_of(q), spec, q, k, options, **fixed, xp=xp)

    def tables(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ATTENDED}

    def tables_of(self, q: Tensor) -> dict[str, Tensor | None]:
        return {name: x if x is None else _local_table(name, x, q, self.spec) for name, x in self.tables().items()}


def fill(module: nn.Module, name: str, draw: Callable[[Tensor], Any]) -> None:
    """Fill a parameter; a parametrised one is set, or what it is computed from is filled if that has no inverse.

    A tensor that something else computes, as in quantised projections, would take no effect.
    """
    x: Any = getattr(module, name, None)
    if parametrize.is_parametrized(module, name):
        computed: Any = module.parametrizations
        if all(hasattr(part, "right_inverse") for part in computed[name]):
            setattr(module, name, draw(torch.empty_like(x, requires_grad=False)))
        else:
            for original in computed[name].parameters(recurse=False):
                draw(original)
    elif isinstance(x, nn.Parameter):
        draw(x)
    else:
        raise ValueError(f"`{name}` of {type(module).__name__} must be a parameter to be drawn anew, got {describe(x)}")


def check_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not is_floating(x, xp=xp):
        raise TypeError(f"`{name}` must be a tensor of a real floating dtype, got {describe(x)}")


def check_multihead(attention: Any, expected: str, *refused: str) -> None:
    if not isinstance(attention, nn.MultiheadAttention):
        raise TypeError(f"`attention` must be a torch.nn.MultiheadAttention, got {describe(attention)}")
    unlike = {name: getattr(attention, name) != attention.embed_dim for name in ("kdim", "vdim")}
    unlike |= {"add_bias_kv": attention.bias_k is not None, "add_zero_attn": attention.add_zero_attn}
    if found := ", ".join(name for name in refused if unlike[name]):
        raise ValueError(f"`attention` must have {expected}, got one made with {found}")


def _check_placed(device: Any, dtype: Any) -> None:
    known = dtype is None or isinstance(dtype, torch.dtype)
    if not known or not is_floating(torch.empty(0, dtype=dtype, device="meta"), xp=xp):
        raise TypeError(f"`dtype` must be a real floating dtype of torch, got {describe(dtype)}")
    try:
        torch.empty(0, dtype=torch.int64, device=device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"`device` must be a device of torch, got {describe(device)}: {error}") from None


def _local_table(name: str, table: Any, q: Tensor, spec: BlockSpec) -> Tensor:
    """Return a table for the queries of this process, with their heads and dtype; gradients reach the original."""
    if hasattr(table, "placements"):  # a DTensor, whose import is slow
        from torch.distributed.tensor import Partial

        # A shared table serves different heads in each process, so its local gradient is a partial sum.
        placements = [Partial() if placement.is_replicate() else placement for placement in table.placements]
        table = table.to_local(grad_placements=placements)
    else:
        _check_heads(name, table, q, spec.num_heads)
    return table if table.dtype == q.dtype else table.to(q.dtype)


def _check_heads(name: str, table: Any, q: Tensor, heads: int) -> None:
    if q.ndim > 2 and q.shape[-3] != heads:
        raise ValueError(
            f"`{name}` must be sharded like the heads, of which {q.shape[-3]} of {heads} are here: give "
            f"the module itself relskew_core.layers.torch.parallel.TableParallel() in its plan, got {describe(table)}"
        )

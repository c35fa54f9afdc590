"""torch: an operator for attention and one for its gradient, derived from the fields of a call.

They work with autograd, ``torch.compile``, ``torch.export`` and ``torch.vmap``. Only here are arrays and options passed
by position, as torch requires it, and taken apart and put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.namespace import private
from relskew_core._array.softmax import log_sum_exp
from relskew_core._kernel import forward
from relskew_core._kernel.backward import attention_vjp as portable_vjp
from relskew_core._kernel.call import (
    KINDS,
    LEARNED,
    TABLES,
    Gradients,
    Operands,
    Options,
    Side,
    named,
    shape_of_out,
    shape_of_sums,
)
from relskew_core._kernel.chunk import keys_seen
from relskew_core._kernel.grids import parts
from relskew_core.backends._torch import decomposed

TYPES = {tuple[Side, ...]: "SymInt[]", int: "SymInt", float: "float", bool: "bool", str: "str"}
"""The types of an operator's arguments that are not tensors."""

COUNT = len(Operands._fields)


def _flattened(kind: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """List the fields of nested dataclasses, except for the operands' lengths: their paths and types."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if "length of" in field.metadata:
            continue
        if is_dataclass(hint):
            yield from _flattened(hint, (*path, field.name))  # type: ignore[arg-type]
        else:
            yield (*path, field.name), hint


def _schema_type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "str"
    if NoneType in get_args(hint):
        (kind,) = set(get_args(hint)) - {NoneType}
        return f"{TYPES[kind]}?"
    return TYPES[hint]


PATHS, HINTS = zip(*_flattened(Options), strict=True)
"""The paths of the numbers in :class:`Options`, and their types."""

NAMES = ["_".join(path) for path in PATHS]
"""The names of these numbers in the operators' schemas."""

_ARRAYS = ", ".join(f"Tensor{'' if name in 'qkv' else '?'} {name}" for name in Operands._fields)
_NUMBERS = ", ".join(f"{_schema_type(hint)} {name}" for name, hint in zip(NAMES, HINTS, strict=True))


def flat(options: Options) -> list[Any]:
    """Return the options as the numbers of an operator's schema."""
    numbers = []
    for path in PATHS:
        value: Any = options
        for name in path:
            value = getattr(value, name)
        numbers.append([number for side in value for number in side] if isinstance(value, tuple) else value)
    return numbers


def _maker(kind: Any) -> Callable[[Operands, Iterator[Any]], Any]:
    """Return a function that makes nested dataclasses from all values in order, and from the operands' lengths."""
    hints = get_type_hints(kind)
    makers = {field.name: _maker_of(field, hints[field.name]) for field in fields(kind)}
    return lambda operands, values: kind(**{name: make(operands, values) for name, make in makers.items()})


def _maker_of(field: Field[Any], hint: Any) -> Callable[[Operands, Iterator[Any]], Any]:
    if "length of" in field.metadata:
        name = field.metadata["length of"]
        return lambda operands, values: getattr(operands, name).shape[-2]
    if hint == tuple[Side, ...]:
        return lambda operands, values: _sides(next(values))
    return _maker(hint) if is_dataclass(hint) else lambda operands, values: next(values)


def _sides(numbers: Sequence[int]) -> tuple[Side, ...]:
    count = len(Side._fields)
    return tuple(Side(*numbers[at : at + count]) for at in range(0, len(numbers), count))


_make_options = _maker(Options)
_modes = private("utils._python_dispatch._get_current_dispatch_mode_stack", list)


class Operator:
    """``relskew::name`` and its gradient, ``relskew::name_vjp``.

    Parameters
    ----------
    name : str
        Of the operator.
    attend : callable
        ``attend(operands, options) -> (out, sums or None)``.
    pull_back : callable
        ``pull_back(d_out, operands, options, *, out, sums, d_lse, wanted)`` returns gradients; ``wanted`` names the
        operands whose gradients are requested.
    keeps : bool
        Whether the output and the sums of weights, then always made, are kept for the backward pass.
    devices : str, optional
        The type of device that the operator runs on.
    """

    def __init__(
        self,
        name: str,
        attend: Callable[..., tuple[Tensor, Tensor | None]],
        pull_back: Callable[..., Gradients | dict[str, Tensor]],
        *,
        keeps: bool = False,
        devices: str | None = None,
    ) -> None:
        self._attend, self._pull_back, self._keeps = attend, pull_back, keeps
        make: Any = partial(torch.library.custom_op, mutates_args=(), device_types=devices)
        given, results = f"{_ARRAYS}, {_NUMBERS}", ", ".join(["Tensor"] * len(LEARNED))
        cotangents = "Tensor d_out, Tensor? d_lse, Tensor? out, Tensor? sums, str wanted"
        self._op = make(f"relskew::{name}", self._forward, schema=f"({given}) -> (Tensor out, Tensor lse)")
        self._vjp_op = make(f"relskew::{name}_vjp", self._vjp, schema=f"({cotangents}, {given}) -> ({results})")
        self.overloads = [getattr(torch.ops.relskew, each).default for each in (name, f"{name}_vjp")]
        for op, fake, backward, setup, mapped in (
            (self._op, self._fake, self._backward, self._setup, self._vmap),
            (self._vjp_op, self._fake_vjp, self._second_backward, self._setup_vjp, self._vmap_vjp),
        ):
            op.register_fake(fake)
            op.register_autograd(backward, setup_context=setup)
            op.register_vmap(mapped)
        decomposed.decompose(self.overloads[0], self._fake, self._decomposed)

    @property
    def op(self) -> Any:
        return self._offered(self._op)

    @property
    def vjp(self) -> Any:
        return self._offered(self._vjp_op)

    def _offered(self, operator: Any) -> Any:
        """Return an operator, with its formula in the ``FlopCounterMode`` that counts, which copies torch's when made.

        Its module is not imported: it imports Triton.
        """
        if not torch.compiler.is_compiling():
            for mode in _modes():
                formulas = getattr(getattr(mode, "counter", None), "flop_registry", {})
                forward = operator is self._op
                formulas[self.overloads[not forward].overloadpacket] = partial(self._flops, forward)
        return operator

    def __call__(self, operands: Operands, options: Options, **_: Any) -> tuple[Tensor, Tensor | None]:
        """Attend; the sums of weights are ``None`` unless requested."""
        out, sums = self.op(*operands, *flat(options))
        return out, sums if options.return_lse else None

    def gradients(self, d_out: Tensor, operands: Operands, options: Options, *, d_lse: Tensor | None) -> Gradients:
        """Return the gradients of every operand, from results that are computed again unless they were kept."""
        args, arrays = [*operands, *flat(options)], named(operands)
        out, sums = self.op(*args) if self._keeps else (None, None)
        given = [name for name in LEARNED if arrays[name] is not None and arrays[name].is_floating_point()]
        found = dict(zip(LEARNED, self.vjp(d_out, d_lse, out, sums, " ".join(given), *args), strict=True))
        return Gradients(**{name: found[name] for name in given if name in Gradients._fields})

    def _flops(self, forward: bool, *args: Any, out_val: Any) -> int:
        """Return the number of operations of a call, as torch counts its own attention: whole if it is causal.

        The backward pass computes the logits again, and has two products for each of the forward pass.
        """
        x, options = self.parts(args if forward else args[-COUNT - len(PATHS) :])
        low, high = options.positions()
        local = options.visibility.left is not None or options.visibility.block_size is not None
        queries = x.q.shape[:-1].numel()
        pairs = queries * (keys_seen(options) if local else x.k.shape[-2])

        def with_table(table: Tensor | None, rows: int) -> int:
            return 0 if table is None else rows * min(table.shape[-2], high - low + 1) * table.shape[-1]

        logits = pairs * x.q.shape[-1] + with_table(x.rel_k, queries) + with_table(x.axis_tables, queries)
        logits += with_table(x.key_table, x.k.shape[:-1].numel())
        values = pairs * x.v.shape[-1] + with_table(x.rel_v, queries)
        return 2 * (logits + values) if forward else 2 * (3 * logits + 2 * values)

    @staticmethod
    def parts(args: Sequence[Any]) -> tuple[Operands, Options]:
        """Reassemble the arguments of an operator."""
        operands = Operands(*args[:COUNT])
        return operands, _make_options(operands, iter(args[COUNT:]))

    def _forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        operands, options = self.parts(args)
        for name in TABLES:  # a program of torch.jit.trace skipped this check for the present lengths
            if getattr(operands, name) is not None:
                options.visibility.check_reach(name, options.span)
        out, sums = self._attend(operands, options)
        return _contiguous(out), operands.q.new_empty(0) if sums is None else _contiguous(sums)

    def _fake(self, *args: Any) -> tuple[Tensor, Tensor]:
        operands, options = self.parts(args)
        q, of_sums = operands.q, shape_of_sums(operands)
        wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
        sums = q.new_empty(of_sums if self._keeps or options.return_lse else (0,), dtype=wide)
        return q.new_empty(shape_of_out(operands), dtype=wide if options.part.of_more else q.dtype), sums

    def _decomposed(self, *args: Any) -> tuple[Tensor, Tensor]:
        operands, options = self.parts(args)
        out, sums = decomposed.for_exporter(operands, options)
        return out, out.new_empty(0) if sums is None else sums

    def _vjp(
        self, d_out: Tensor, d_lse: Tensor | None, out: Tensor | None, sums: Tensor | None, wanted: str, *args: Any
    ) -> tuple[Tensor, ...]:
        operands, options = self.parts(args)
        names = wanted.split()
        found = self._pull_back(d_out, operands, options, out=out, sums=sums, d_lse=d_lse, wanted=frozenset(names))
        gradients = found if isinstance(found, dict) else named(found)

        def own(name: str) -> Tensor:
            gradient = gradients.get(name) if name in names else None
            if gradient is None:
                return d_out.new_empty(0)
            return _contiguous(gradient.to(getattr(operands, name).dtype))

        return tuple(map(own, LEARNED))

    def _fake_vjp(
        self, d_out: Tensor, d_lse: Tensor | None, out: Tensor | None, sums: Tensor | None, wanted: str, *args: Any
    ) -> tuple[Tensor, ...]:
        operands, _ = self.parts(args)
        arrays, names = named(operands), wanted.split()
        found = (arrays[name] if name in names else None for name in LEARNED)
        empty = d_out.new_empty
        return tuple(empty(0) if x is None or not x.dtype.is_floating_point else x.new_empty(x.shape) for x in found)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _keep(ctx, inputs, *(output if self._keeps else (None, None)))

    def _backward(self, ctx: Any, d_out: Tensor, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        args, out, sums = _kept(ctx)
        _, options = self.parts(args)
        d_lse = d_sums[..., 1] if options.return_lse else None
        names = [name for name, needs in zip(Operands._fields, ctx.needs_input_grad, strict=False) if needs]
        gradients = self.vjp(d_out, d_lse, out, sums, " ".join(names), *args)
        found = {name: x for name, x in zip(LEARNED, gradients, strict=True) if name in names}
        return (*(found.get(name) for name in Operands._fields), *(None for _ in args[COUNT:]))

    def _setup_vjp(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        d_out, d_lse, _, _, ctx.wanted, *args = inputs
        _keep(ctx, args, d_out, d_lse)

    def _second_backward(self, ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Differentiate the portable gradient, in which the output is again a function of the operands."""
        args, d_out, d_lse = _kept(ctx)
        operands, options = self.parts(args)
        names = ctx.wanted.split()
        with torch.enable_grad():
            # Views, because an array that is passed twice, as k and as v, has two gradients.
            operands = Operands(*(None if x is None else x.view_as(x) for x in operands))
            d_out, d_lse = (None if x is None else x.view_as(x) for x in (d_out, d_lse))
            if options.sides:
                gradients = gradients_on_grids(d_out, operands, options, names, d_lse)
            else:
                gradients = named(portable_vjp(d_out, operands, options, d_lse=d_lse, xp=xp))
        pairs = [
            (gradient, cotangent)
            for name, cotangent in zip(LEARNED, cotangents, strict=True)
            if name in names and (gradient := gradients.get(name)) is not None and gradient.requires_grad
        ]
        given = {"d_out": d_out, "d_lse": d_lse, **named(operands)}
        wanted = {name: x for name, x in given.items() if x is not None and x.requires_grad}
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outputs, grad_outputs = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                outputs, list(wanted.values()), grad_outputs, create_graph=torch.is_grad_enabled(), allow_unused=True
            )
        of = dict(zip(wanted, found, strict=True))
        in_order = [of.get("d_out"), of.get("d_lse"), None, None, None, *(of.get(name) for name in Operands._fields)]
        return (*in_order, *(None for _ in args[COUNT:]))

    def _vmap(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        operands, dims = Operands(*args[:COUNT]), Operands(*in_dims[:COUNT])
        rank = operands.q.ndim - (dims.q is not None)
        moved = {
            name: KINDS[name].mapped(x, getattr(dims, name), info.batch_size, rank, xp=xp)
            for name, x in named(operands).items()
            if x is not None
        }
        # If mapped arrays are not shared, or dropout draws per item, run each item separately.
        if operands.seed is not None or any(x is None for x in moved.values()):
            items = [self.op(*_item(args, in_dims, index)) for index in range(info.batch_size)]
            outs, sums = zip(*items, strict=True)
            return (torch.stack(outs), torch.stack(sums)), (0, 0)
        out, own = self.op(*operands._replace(**moved), *args[COUNT:])
        if own.ndim < 2:  # they were not requested
            own = own.new_empty((info.batch_size, 0))
        return (out, own), (0, 0)

    def _vmap_vjp(
        self, info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        items = [self.vjp(*_item(args, in_dims, index)) for index in range(info.batch_size)]
        return tuple(torch.stack(parts) for parts in zip(*items, strict=True)), (0,) * len(LEARNED)


def gradients_on_grids(
    d_out: Any, operands: Operands, options: Options, wanted: Sequence[str], d_lse: Tensor | None
) -> dict[str, Tensor | None]:
    """Return gradients that can be differentiated again, from those of the parts of a call."""
    inputs: list[Any] = [getattr(operands, name) for name in wanted]
    results, cotangents = list[Tensor](), list[Tensor]()
    for rows, own, of_part in parts(operands, replace(options, return_lse=True), xp=xp):
        out, sums = forward.attention(own, of_part, xp=xp)
        pairs = (out, d_out[..., rows, :]), (log_sum_exp(sums), None if d_lse is None else d_lse[..., rows])
        results += [result for result, cotangent in pairs if cotangent is not None]
        cotangents += [cotangent.to(result.dtype) for result, cotangent in pairs if cotangent is not None]
    found = torch.autograd.grad(results, inputs, cotangents, create_graph=True, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _keep(ctx: Any, args: Sequence[Any], *more: Tensor | None) -> None:
    """Save an operator's arguments, with tensors in autograd's care."""
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in args), *more)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in args]


def _kept(ctx: Any) -> tuple[list[Any], Tensor | None, Tensor | None]:
    """Return the arguments that :func:`_keep` saved."""
    *tensors, one, two = saved_by(ctx)
    args = [number if tensor is None else tensor for tensor, number in zip(tensors, ctx.numbers, strict=True)]
    return args, one, two


def saved_by(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors that a node of autograd saved; if one was overwritten, say what does that."""
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # checkpoints only allow this once
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise ValueError(
            "an array of attention was overwritten before its gradients were computed; a cache with a `length` is, "
            "by the next call that gets it as `past`: to train through several calls, pass empty_cache(batch), which "
            "grows, as the first `past`"
        ) from error
    return saved


def _contiguous(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and in separate memory, as operators must, and as the fake kernel declares."""
    separate = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if separate else x.clone(memory_format=torch.contiguous_format)


def _item(args: tuple[Any, ...], in_dims: tuple[int | None, ...], index: int) -> list[Any]:
    return [arg.select(dim, index) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]

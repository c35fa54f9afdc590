"""``context_parallel_attention``: relative attention of a sequence that is split over processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from math import prod
from typing import Any, Literal, get_args

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.checks import check_bool, check_choice, describe, is_array
from relskew_core._array.softmax import log_sum_exp
from relskew_core._functions.attention import attend
from relskew_core._kernel.by_head import HeadScales, with_sinks
from relskew_core._kernel.call import DIFFERENTIABLE, KINDS, Arguments, Part, takes
from relskew_core._kernel.kinds import MASK, RowsKind
from relskew_core._kernel.problem import Problem, problem
from relskew_core.distributed._layout import LAYOUTS, Layout, check_whole, needed, runs
from relskew_core.distributed.torch._parts import Gathered, PartsAttention, PartsPlan, Ring
from relskew_core.distributed.torch._sequence import Ranks, agreed, groups, joined, taken_apart, whole

HEADS = -3
"""The axis of the heads, before positions and width."""


class _Exchange(torch.autograd.Function):
    """Some heads (…, H / P, L, D) of all positions, from all heads (…, H, L / P, D) of some; or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, back: bool) -> Tensor:
        ctx.rest = ranks, layout, back
        return _exchanged(x, ranks, layout, back=back)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, layout, back = ctx.rest
        return _exchanged(grad_outputs[0], ranks, layout, back=not back), None, None, None


def _exchanged(x: Tensor, ranks: Ranks, layout: Layout, *, back: bool) -> Tensor:
    if back:
        found = ranks.exchanged(taken_apart(x, ranks.size, -2, layout))
        return found.movedim(0, HEADS - 1).flatten(HEADS - 1, HEADS)
    parts = x.unflatten(HEADS, (ranks.size, x.shape[HEADS] // ranks.size)).movedim(HEADS - 1, 0)
    return joined(ranks.exchanged(parts), -2, layout)


def exchange(x: Tensor, ranks: Ranks, layout: Layout, *, back: bool = False) -> Tensor:
    apply: Any = _Exchange.apply
    return apply(x, ranks, layout, back)


def of_heads(given: Arguments, ranks: Ranks, layout: Layout) -> Arguments:
    heads, size = given.q.shape[HEADS], ranks.size
    own = slice(ranks.rank * heads // size, (ranks.rank + 1) * heads // size)
    changed: dict[str, Any] = {}
    for name, x in given.arrays().items():
        if x is None:
            continue
        if isinstance(KINDS[name], RowsKind):
            # there are fewer key heads than ranks: each rank has a copy of the one that it needs
            if x.shape[HEADS] % size:
                x = x.repeat_interleave(size // x.shape[HEADS], dim=HEADS)
            changed[name] = exchange(x, ranks, layout)
        elif KINDS[name] is MASK:
            changed[name] = _mask(x, own, given, ranks, layout)
        elif "heads" in KINDS[name].along(x, given.q):
            changed[name] = x[own]
    if given.segments is not None:
        pair = given.segments if isinstance(given.segments, tuple) else (given.segments, given.segments)
        changed["segments"] = tuple(whole(x, ranks, -1, layout) for x in pair)
    if given.sinks is not None:
        by_head = given.sinks.ndim == 1
        changed["sinks"] = given.sinks[own] if by_head else exchange(given.sinks[..., None], ranks, layout)[..., 0]
    return replace(given, **changed)


def _mask(mask: Tensor, own: slice, given: Arguments, ranks: Ranks, layout: Layout) -> Tensor:
    by_head = mask.ndim > 2 and mask.shape[HEADS] == given.q.shape[HEADS]
    if mask.ndim < 2 or mask.shape[-2] != given.q.shape[-2]:
        return mask[..., own, :, :] if by_head else mask
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask  # not every backend sends booleans
    sent = exchange(sent, ranks, layout) if by_head else whole(sent, ranks, -2, layout)
    return sent.bool() if mask.dtype == torch.bool else sent


Method = Literal["ring", "gather", "heads"]
METHODS = get_args(Method)


@dataclass(eq=False)
class _Parallel(Arguments):
    _: KW_ONLY
    group: Any
    method: Method = "ring"
    layout: Layout = "contiguous"
    return_lse: bool = False
    check: bool = True


@takes(_Parallel)
def context_parallel_attention(given: _Parallel) -> Tensor | tuple[Tensor, Tensor]:
    """Attend as :func:`relskew_core.relative_attention` does, to a sequence that is split over processes.

    Each rank passes its shard of the positions of ``q``, ``k`` and ``v`` (:func:`shard_sequence`) and gets its shard of
    the output. Tables are whole on every rank, and the gradient on each rank is a part of the whole: sum it over the
    group, like those of all other parameters of a model that is trained on split sequences.

    Parameters
    ----------
    q, k, v, rel_q : Tensor, shapes (..., H, Lq, D), (..., Hkv, Lk, D), (..., Hkv, Lk, Dv), (..., H, Lq, Dr)
        This rank's shard, of the same length on all ranks.
    rel_k, span, rel_v, rel_bias, key_table, sinks, scale, rel_scale, softcap, chunk_size, impl
        As in :func:`relskew_core.relative_attention`, the same on all ranks, except for sinks ``(..., H, Lq)``, of this
        rank's shard.
    causal, window, offset
        As there, of the whole sequence; ``offset`` is an int.
    mask : Tensor, optional
        For this rank's queries and all keys of the whole sequence, in their order there; broadcasts to
        ``(..., H, Lq, P · Lk)``.
    segments : Tensor of integers, shape (..., L) or (L,), or a pair of them, optional
        Of this rank's shard. Use a pair to hide padding: give its keys a number that no query has.
    block_size, blocks_before
        Local attention: only with ``method="heads"``.
    dropout, seed
        The same seed on all ranks; it drops the same weights as for the whole sequence on one device.
    positions
        Raise an error: the positions follow from ``layout`` and ``offset``.
    group : ProcessGroup or DeviceMesh
        The ranks that share the sequence. With a mesh of two axes, (ring, heads), heads are exchanged along the second
        axis, whose ranks should be closer, and keys are sent around the first.
    method : {"ring", "gather", "heads"}, default "ring"
        ``"ring"``: keys and values travel around a ring, in the memory of two shards; ``"gather"``: every rank gathers
        all of them; ``"heads"``: ranks exchange positions for heads, whose number must be a multiple of the number of
        ranks.
    layout : {"contiguous", "zigzag", "striped"}, default "contiguous"
        As in :func:`shard_sequence`. With the last two, causal attention costs the same on every rank.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits.
    check : bool, default True
        Compare the arguments of all ranks before anything else is sent, so that an error on one rank is raised on all.
        This costs a message of 16 bytes and, on devices, a synchronisation.

    Returns
    -------
    out : Tensor, shape (..., H, Lq, Dv)
        This rank's shard. For arrays in half precision, parts are merged in float32.
    lse : Tensor, shape (..., H, Lq)
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError
        On all ranks, if an argument does not fit on one of them or differs between them; the message names it.

    Notes
    -----
    Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Jacobs et al. 2023,
    "DeepSpeed Ulysses"; Brandon et al. 2023, "Striped Attention". Attention of one shard to another is a call with
    offset zero and other rows of the tables. A ring sends ``2 (P - 1)`` shards of keys forward and ``4 (P - 1)``
    backward, gathering ``2 (P - 1)`` each, and heads ``4 (P - 1) / P`` each (with as many key heads as heads); with a
    window, fewer.

    Examples
    --------
    One process here; the call is the same for many:

    >>> import torch
    >>> import torch.distributed as dist
    >>> from relskew_core import relative_attention
    >>> from relskew_core.distributed.torch import shard_sequence, unshard_sequence
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k, v, rel_k = *torch.randn(3, 3, 2, 8, 4), torch.randn(8, 4)
    >>> group = dist.group.WORLD
    >>> out = context_parallel_attention(q, k, v, rel_k, causal=True, group=group)
    >>> torch.allclose(out, relative_attention(q, k, v, rel_k, causal=True), atol=1e-5)
    True

    The zigzag layout, which gives all processes of a causal model equal work:

    >>> zigzag = [shard_sequence(x, group, layout="zigzag") for x in (q, k, v)]
    >>> part = context_parallel_attention(
    ...     *zigzag, rel_k, causal=True, group=group, layout="zigzag"
    ... )
    >>> torch.allclose(unshard_sequence(part, group, layout="zigzag"), out, atol=1e-5)
    True

    Each process with some of the heads and the whole sequence in between:

    >>> heads = context_parallel_attention(
    ...     q, k, v, rel_k, causal=True, group=group, method="heads"
    ... )
    >>> torch.allclose(heads, out, atol=1e-5)
    True
    >>> dist.destroy_process_group()
    """
    return _untraced(given)


def _attend(given: _Parallel) -> Any:
    outer, inner = groups(given.group)
    everyone = [Ranks.of(group) for group in (outer, inner) if group is not None]
    if given.check:
        inside = (
            (lambda: _facts(given, everyone))
            if inner is None
            else lambda: agreed(lambda: _facts(given, everyone), given.q, everyone[1])
        )
        agreed(inside, given.q, everyone[0])
    arguments = _plain(given).autocast()
    sinks = arguments.sinks
    scales = HeadScales.of(arguments, xp=xp)
    arguments = replace(arguments if scales is None else scales.applied(arguments), sinks=None)
    ring, layout, part = everyone[0], given.layout, Part()
    heads = everyone[-1] if inner is not None or given.method == "heads" else None
    within: Layout = "contiguous" if inner is not None else layout
    if heads is not None:
        count = arguments.q.shape[HEADS]
        part = Part(head=heads.rank * count // heads.size, heads=count)
        arguments = of_heads(replace(arguments, sinks=sinks), heads, within)
        sinks, arguments = arguments.sinks, replace(arguments, sinks=None)
    out: Any
    sums: Any
    if given.method == "heads":
        wants_lse = given.return_lse or sinks is not None
        out, sums = attend(problem(arguments, return_lse=wants_lse, part=part), arguments.impl)
    else:
        call = problem(replace(arguments, mask=None))
        plan = _plan(arguments, call, ring, given, part)
        pair = arguments.segments if isinstance(arguments.segments, tuple) else (arguments.segments,) * 2
        seed = arguments.seed if is_array(arguments.seed) else None
        arrays = [*arguments.arrays().values(), *pair, seed]
        apply: Any = PartsAttention.apply
        out, sums = apply(plan, *arrays)
    if sinks is not None:
        out, sums = with_sinks(out, sums, sinks, xp=xp)
    out = out.to(arguments.q.dtype)
    if heads is not None:
        out = exchange(out, heads, within, back=True)
        sums = exchange(sums, heads, within, back=True) if given.return_lse else None
    return (out, log_sum_exp(sums)) if given.return_lse else out


_untraced: Any = torch.compiler.disable(_attend, reason="what ranks send each other is not traced")


def _plain(given: _Parallel) -> Arguments:
    return Arguments(**{field.name: getattr(given, field.name) for field in fields(Arguments)})


def _plan(given: Arguments, call: Problem, ranks: Ranks, parallel: _Parallel, part: Part) -> PartsPlan:
    pattern, layout = call.options.visibility, parallel.layout
    queries, keys = (
        [runs(layout, ranks.size, index, x.shape[-2]) for index in range(ranks.size)] for x in (given.q, given.k)
    )
    bounds = (pattern.offset, pattern.left, pattern.right)
    rounds: Ring | Gathered
    if parallel.method == "ring":
        rounds = Ring(ranks, keys, needed(queries, keys, *bounds))
    else:
        rounds = Gathered.of(ranks, layout, given.k.shape[-2])
    nothing: dict[str, Any] = dict.fromkeys(DIFFERENTIABLE)
    options = replace(given, **nothing, segments=None)
    return PartsPlan(options, call.options.span, *bounds, queries[ranks.rank], rounds, part)


def _facts(given: _Parallel, everyone: list[Ranks]) -> Mapping[str, Any]:
    """Check this rank's call; return the facts that must be equal on all ranks."""
    method, layout = given.method, given.layout
    check_choice("method", method, METHODS)
    check_choice("layout", layout, LAYOUTS)
    check_bool("return_lse", given.return_lse)
    if len(everyone) > 1 and method == "heads":
        raise ValueError("`method` must be 'ring' or 'gather' with a mesh of two axes, (ring, heads)")
    if not isinstance(given.q, Tensor):
        raise TypeError(f"`q` must be a Tensor, got {describe(given.q)}")
    if given.positions is not None:
        raise ValueError("`positions` must be None: they follow from `layout` and `offset`")
    if is_array(given.offset) or not isinstance(given.offset, int | None):
        raise TypeError(f"`offset` must be an int, the same for all items, got {describe(given.offset)}")
    if given.block_size is not None and method != "heads":
        raise ValueError(f"`block_size` needs method='heads', whose ranks see whole sequences, got method={method!r}")
    call = problem(replace(_plain(given), mask=None))
    size = prod(ranks.size for ranks in everyone)
    check_whole(_plain(given), call, size, layout, xp=xp, outer=everyone[0].size)
    _check_heads(given, everyone[-1] if len(everyone) > 1 or method == "heads" else None)
    facts = {field.name: getattr(given, field.name) for field in fields(given) if field.name != "group"}
    return {name: describe(x) if is_array(x) or isinstance(x, tuple) else repr(x) for name, x in facts.items()}


def _check_heads(given: _Parallel, ranks: Ranks | None) -> None:
    if ranks is None:
        return
    heads, of_keys = (x.shape[HEADS] if x.ndim > 2 else 1 for x in (given.q, given.k))
    if given.q.ndim < 3 or heads % ranks.size:
        raise ValueError(f"`q` must have a multiple of {ranks.size} heads to exchange, got {describe(given.q)}")
    if of_keys % ranks.size and ranks.size % of_keys:
        raise ValueError(f"`k` must have a multiple or a divisor of {ranks.size} heads, got {describe(given.k)}")

"""Attentions of text models as blocks: tensor2tensor and T5."""

from __future__ import annotations

from collections.abc import Mapping

from relskew_core._array.checks import check_bool, check_int
from relskew_core._array.typing import Array
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core.conventions._ascending import SHAW, TENSOR2TENSOR_CAUSAL, TENSOR2TENSOR_UNMASKED
from relskew_core.conventions._buckets import T5
from relskew_core.conventions._convention import load_named
from relskew_core.conventions._state import FORMS, State, Weights, as_block, note_head_width, read_weights


def load_tensor2tensor(
    state: Mapping[str, Array],
    *,
    num_heads: int,
    causal: bool,
    block_size: int | None = None,
    prefix: str = "",
) -> tuple[BlockSpec, Weights]:
    """Read a ``multihead_attention`` of tensor2tensor: Shaw's ``dot_product_relative`` or the relative version 2.

    Parameters
    ----------
    state : mapping of str to array
        The variables of a checkpoint, converted to one array library.
    num_heads : int
        Number of heads.
    causal : bool
        A decoder's self-attention.
    block_size : int, optional
        Of Music Transformer's local attention.
    prefix : str, default ""
        Scope up to and including ``"multihead_attention/"``.

    Returns
    -------
    spec : BlockSpec
        Without biases: tensor2tensor has none.
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    See Also
    --------
    SHAW : the tables alone.
    relskew_core.attention_block : runs the block.

    Examples
    --------
    The variables of a decoder's attention of width 8 with two heads, in the version of Shaw et al.:

    >>> import numpy as np
    >>> scope = "body/layer_0/self_attention/multihead_attention/"
    >>> state = {
    ...     f"{scope}{name}/kernel": np.eye(8)
    ...     for name in ("q", "k", "v", "output_transform")
    ... }
    >>> for role in ("keys", "values"):
    ...     state[f"{scope}relative_positions_{role}/embeddings"] = np.ones((33, 4))
    >>> spec, weights = load_tensor2tensor(state, num_heads=2, causal=True, prefix=scope)
    >>> spec.span, spec.rel_values
    (Span(left=16, right=16, beyond='clip'), True)
    >>> from relskew_core import attention_block
    >>> attention_block(np.ones((1, 20, 8)), weights, spec).shape
    (1, 20, 8)
    """
    check_bool("causal", causal)
    read = State(state, prefix, "output_transform/kernel", H=check_int("num_heads", num_heads, minimum=1))
    weights: Weights = {}
    for name, other in zip(PROJECTIONS, ("q", "k", "v", "output_transform"), strict=True):
        transposed = " ".join(reversed(FORMS[name].split()))
        weights[f"{name}.weight"] = read.read(f"{other}/kernel", transposed)
    weights = {key: read.xp.matrix_transpose(kernel) for key, kernel in weights.items()}
    note_head_width(read, "q/kernel")
    tables, span = _tables(read, causal=causal)
    return as_block(read, weights | tables, span, causal=causal, block_size=block_size)


def load_t5(
    state: Mapping[str, Array],
    *,
    num_heads: int,
    bidirectional: bool,
    num_buckets: int = 32,
    max_distance: int = 128,
    prefix: str = "",
    bias_prefix: str | None = None,
) -> tuple[BlockSpec, Weights]:
    """Read the self-attention of an HF ``T5Attention``: projections without biases, and a bias by relative position.

    T5 does not scale its logits and a block does: ``q_proj.weight`` is T5's times the square root of a head's width.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        ``config.num_heads``.
    bidirectional : bool
        Encoder (True) or decoder.
    num_buckets : int, default 32
        ``config.relative_attention_num_buckets``.
    max_distance : int, default 128
        ``config.relative_attention_max_distance``.
    prefix : str, default ""
        The prefix of the attention in it: ``"encoder.block.3.layer.0.SelfAttention."``.
    bias_prefix : str, optional
        The prefix of the layer that has ``relative_attention_bias``, the stack's first; ``prefix`` by default.

    Returns
    -------
    spec : BlockSpec
        Without biases of projections, and with ``rel_bias``.
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    See Also
    --------
    T5 : the table of biases alone.
    relskew_core.attention_block : runs the block.

    Examples
    --------
    The state dict of an encoder's first attention, of width 8 with two heads:

    >>> import numpy as np
    >>> state = {f"{name}.weight": np.eye(8) for name in "qkvo"}
    >>> state["relative_attention_bias.weight"] = np.ones((32, 2))
    >>> spec, weights = load_t5(state, num_heads=2, bidirectional=True)
    >>> spec.rel_bias, weights["rel_bias"].shape
    (True, (2, 257))
    >>> from relskew_core import attention_block
    >>> attention_block(np.ones((1, 20, 8)), weights, spec).shape
    (1, 20, 8)
    """
    t5 = T5(bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
    read = State(state, prefix, "o.weight", H=check_int("num_heads", num_heads, minimum=1), B=num_buckets)
    weights = read_weights(read, {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"})
    weights["q_proj.weight"] = weights["q_proj.weight"] * read.sizes["D"] ** 0.5
    read.check_prefix("bias_prefix", prefix if bias_prefix is None else bias_prefix, "relative_attention_bias.weight")
    weights["rel_bias"], span = t5.load(read.read("relative_attention_bias.weight", "B H", prefix=bias_prefix))
    return as_block(read, weights, span, causal=not bidirectional)


def _tables(state: State, *, causal: bool) -> tuple[Weights, Span]:
    """Read a table for keys and, if there is one, for values: both clipped, or both of version 2."""
    clipped = [state.find(f"relative_positions_{role}s/embeddings") for role in ("key", "value")]
    version_2 = [state.find(f"{role}_relative_embeddings") for role in ("key", "value")]
    if any(clipped) and any(version_2):
        found = ", ".join(state.prefix + name for name in clipped + version_2 if name)
        raise ValueError(f"`state` must have the tables of one version of relative attention, got {found}")
    keys, values = clipped if any(clipped) else version_2
    if keys is None:
        raise state.lacks("relative_positions_keys/embeddings or key_relative_embeddings")
    convention, forms = TENSOR2TENSOR_CAUSAL if causal else TENSOR2TENSOR_UNMASKED, ["R D", "H R D"]
    if any(clipped):
        convention, forms = SHAW, ["R D"]
        if values is None:  # only version 2 may have a table for the keys alone
            raise state.lacks("relative_positions_values/embeddings")
    table = state.read(keys, *forms)
    rel_k, span = load_named(convention, state.label(keys), table)
    if values is None:
        return {"rel_k": rel_k}, span
    same_heads = [form for form in forms if len(form.split()) == table.ndim]
    rel_v, _ = load_named(convention, state.label(values), state.read(values, *same_heads))
    return {"rel_k": rel_k, "rel_v": rel_v}, span

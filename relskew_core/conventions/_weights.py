"""State dicts of other code bases as specs and mappings of weights: renamed, never copied where names suffice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relskew_core._array.checks import check_bool, check_int, describe
from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._array.typing import Array
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core.conventions._bias import from_t5
from relskew_core.conventions._rows import from_shaw, from_tensor2tensor, from_vits

Weights = dict[str, Array]


def load_vits(state: Mapping[str, Array], *, num_heads: int, prefix: str = "") -> tuple[BlockSpec, Weights]:
    """Read an HF ``VitsAttention``: window on keys and values, one table for all heads.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        ``config.num_attention_heads``.
    prefix : str, default ""
        Where the attention stands in it: ``"text_encoder.encoder.layers.0.attention."``.

    Returns
    -------
    spec : BlockSpec
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    Raises
    ------
    ValueError, TypeError
        If a key is missing or a shape does not fit; the message names it.
    """
    names = {name: name for name in PROJECTIONS}
    weights = _projections(state, prefix, names)
    tables = {name: from_vits(_get(state, f"{prefix}emb_{name}")) for name in ("rel_k", "rel_v")}
    weights |= {name: table for name, (table, _) in tables.items()}
    return _block(weights, num_heads, tables["rel_k"][1])


def load_wav2vec2_bert(
    state: Mapping[str, Array], *, num_heads: int, left: int = 64, prefix: str = ""
) -> tuple[BlockSpec, Weights]:
    """Read an HF ``Wav2Vec2BertSelfAttention`` with ``position_embeddings_type="relative_key"``.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        ``config.num_attention_heads``.
    left : int, default 64
        ``config.left_max_position_embeddings``.
    prefix : str, default ""
        Where the attention stands in it: ``"encoder.layers.0.self_attn."``.

    Returns
    -------
    spec : BlockSpec
    weights : dict of str to array

    Raises
    ------
    ValueError, TypeError
        If a key is missing or a shape does not fit; the message names it.
    """
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "out_proj": "linear_out"}
    weights = _projections(state, prefix, names)
    weights["rel_k"], span = from_shaw(_get(state, f"{prefix}distance_embedding.weight"), left=left)
    return _block(weights, num_heads, span)


def load_tensor2tensor(
    variables: Mapping[str, Array],
    *,
    num_heads: int,
    causal: bool,
    block_size: int | None = None,
    prefix: str = "",
) -> tuple[BlockSpec, Weights]:
    """Read a ``multihead_attention`` of tensor2tensor: Shaw's ``dot_product_relative`` or the relative version 2.

    Parameters
    ----------
    variables : mapping of str to array
        Variables of a checkpoint by name, brought into one array library.
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

    Raises
    ------
    ValueError, TypeError
        If a key is missing or a shape does not fit; the message names it.
    """
    check_bool("causal", causal)
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "output_transform"}
    kernels = {ours: _get(variables, f"{prefix}{theirs}/kernel") for ours, theirs in names.items()}
    xp = namespace_of_arrays(kernels)
    weights = {f"{ours}.weight": xp.matrix_transpose(kernel) for ours, kernel in kernels.items()}
    spans: list[Span] = []
    for ours, role in (("rel_k", "key"), ("rel_v", "value")):
        clipped = _find(variables, prefix, f"relative_positions_{role}s/embeddings")
        tables = _find(variables, prefix, f"{role}_relative_embeddings")
        if clipped is not None:
            weights[ours], span = from_shaw(clipped)
        elif tables is not None:
            weights[ours], span = from_tensor2tensor(tables, causal=causal)
        else:
            continue
        spans.append(span)
    if "rel_k" not in weights:
        raise ValueError(
            f"`variables` must have relative_positions_keys/embeddings or key_relative_embeddings under {prefix!r}, "
            f"got {_listed(variables, prefix)}"
        )
    return _block(weights, num_heads, spans[0], causal=causal, block_size=block_size)


def load_music_transformer(
    state: Mapping[str, Array], *, num_heads: int, prefix: str = ""
) -> tuple[BlockSpec, Weights]:
    """Read the attention of a PyTorch port of Music Transformer.

    Known are ``in_proj_weight, out_proj, Er`` (gwinndr), ``Wq, Wk, Wv, fc, E`` (jason9693) and ``wq, wk, wv, wo,
    E.weight`` (spectraldoy; a table for each head, clipped).

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        Number of heads.
    prefix : str, default ""
        Where the attention stands in it: ``"transformer.encoder.layers.0.self_attn."``.

    Returns
    -------
    spec : BlockSpec
        Causal.
    weights : dict of str to array

    Raises
    ------
    ValueError, TypeError
        If a key is missing or a shape does not fit; the message names it. Two ports never saved their table: it was
        no parameter, and every run drew another one.
    """
    if f"{prefix}in_proj_weight" in state:
        weights = _packed(state, prefix)
        weights["rel_k"] = _get(state, f"{prefix}Er")
        return _block(weights, num_heads, Span.causal(weights["rel_k"].shape[-2]), causal=True)
    if f"{prefix}Wq.weight" in state:
        names = {"q_proj": "Wq", "k_proj": "Wk", "v_proj": "Wv", "out_proj": "fc"}
        weights = _projections(state, prefix, names)
        weights["rel_k"] = _get(state, f"{prefix}E")
        return _block(weights, num_heads, Span.causal(weights["rel_k"].shape[-2]), causal=True)
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "out_proj": "wo"}
    weights = _projections(state, prefix, names)
    weights["rel_k"] = _by_head(_get(state, f"{prefix}E.weight"), num_heads)
    return _block(weights, num_heads, Span(weights["rel_k"].shape[-2] - 1, 0, "clip"), causal=True)


def load_t5(
    state: Mapping[str, Array],
    *,
    bidirectional: bool,
    max_distance: int = 128,
    prefix: str = "",
    bias_prefix: str | None = None,
) -> tuple[Weights, Span]:
    """Read an HF ``T5Attention``: projections without biases, and the bias by relative position.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    bidirectional : bool
        Encoder (True) or decoder.
    max_distance : int, default 128
        ``config.relative_attention_max_distance``.
    prefix : str, default ""
        Where the attention stands in it: ``"encoder.block.3.layer.0.SelfAttention."``.
    bias_prefix : str, optional
        Where the layer stands that has ``relative_attention_bias``, the stack's first; ``prefix`` by default.

    Returns
    -------
    weights : dict of str to array
        ``q_proj.weight`` … ``out_proj.weight``, and ``rel_bias (H, R)`` for ``relative_attention(scale=1)``.
    span : Span

    Raises
    ------
    ValueError, TypeError
        If a key is missing or a shape does not fit; the message names it.
    """
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
    weights = _projections(state, prefix, names)
    table = _get(state, f"{prefix if bias_prefix is None else bias_prefix}relative_attention_bias.weight")
    weights["rel_bias"], span = from_t5(table, bidirectional=bidirectional, max_distance=max_distance)
    return weights, span


def _block(
    weights: Weights, num_heads: int, span: Span, *, causal: bool = False, block_size: int | None = None
) -> tuple[BlockSpec, Weights]:
    """Return the spec that the weights' shapes say, and the weights in its order."""
    width, embed_dim = weights["q_proj.weight"].shape
    num_heads = check_int("num_heads", num_heads, minimum=1)
    if width % num_heads:
        raise ValueError(f"`num_heads` must divide the width of the queries, {width}, got {num_heads}")
    spec = BlockSpec(
        int(embed_dim), num_heads, span, head_dim=int(width) // num_heads, causal=causal, block_size=block_size,
        shared_table=weights["rel_k"].ndim == 2, rel_values="rel_v" in weights, bias="q_proj.bias" in weights,
    )  # fmt: skip
    spec.check_weights(weights)
    return spec, {key: weights[key] for key in spec.weight_shapes()}


def _projections(state: Mapping[str, Array], prefix: str, names: Mapping[str, str]) -> Weights:
    """Rename the projections; where some have a bias, the others get zeros."""
    weights = {f"{ours}.weight": _get(state, f"{prefix}{theirs}.weight") for ours, theirs in names.items()}
    xp = namespace_of_arrays(weights)
    biases = {ours: state.get(f"{prefix}{theirs}.bias") for ours, theirs in names.items()}
    if any(bias is not None for bias in biases.values()):
        for ours, bias in biases.items():
            weights[f"{ours}.bias"] = xp.zeros_like(weights[f"{ours}.weight"][:, 0]) if bias is None else bias
    return weights


def _packed(state: Mapping[str, Array], prefix: str) -> Weights:
    """Cut the packed projections of ``torch.nn.MultiheadAttention`` into three."""
    weights: Weights = {}
    for kind, packed in (("weight", "in_proj_weight"), ("bias", "in_proj_bias")):
        rows = state.get(f"{prefix}{packed}")
        if rows is None:
            continue
        width = rows.shape[0] // 3
        for index, ours in enumerate(("q_proj", "k_proj", "v_proj")):
            weights[f"{ours}.{kind}"] = rows[index * width : (index + 1) * width, ...]
        weights[f"out_proj.{kind}"] = _get(state, f"{prefix}out_proj.{kind}")
    return weights


def _by_head(table: Array, num_heads: int) -> Array:
    """Split rows as wide as all heads into a table for each head: (R, H · D) -> (H, R, D)."""
    num_heads = check_int("num_heads", num_heads, minimum=1)
    if table.ndim != 2 or table.shape[-1] % num_heads:
        raise ValueError(f"`num_heads` must divide the width of the table, got {num_heads} and {describe(table)}")
    xp = namespace_of_arrays({"table": table})
    return xp.moveaxis(xp.reshape(table, (table.shape[0], num_heads, -1)), -2, -3)


def _get(state: Any, key: str) -> Array:
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` must be a mapping from names to arrays, got {describe(state)}")
    if key not in state:
        place = key[: max(key.rfind("."), key.rfind("/")) + 1]
        raise ValueError(f"`state` must have {key!r}; its keys there are {_listed(state, place)}")
    return state[key]


def _find(variables: Mapping[str, Array], prefix: str, suffix: str) -> Array | None:
    """Return the one variable under ``prefix`` that ends in ``suffix``; the scope between has many names."""
    keys = [key for key in variables if key.startswith(prefix) and key.endswith(f"/{suffix}")]
    if len(keys) > 1:
        raise ValueError(f"`prefix` must single out one attention, got {prefix!r} with {', '.join(sorted(keys))}")
    return variables[keys[0]] if keys else None


def _listed(state: Mapping[str, Any], prefix: str) -> str:
    keys = sorted(str(key) for key in state if str(key).startswith(prefix)) or sorted(map(str, state))
    return ", ".join(keys[:12]) + (" …" if len(keys) > 12 else "") if keys else "none"

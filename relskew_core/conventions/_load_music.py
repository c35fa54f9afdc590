"""Attentions of Music Transformer's ports to PyTorch as blocks."""

from __future__ import annotations

from collections.abc import Mapping

from relskew_core._array.checks import check_int
from relskew_core._array.typing import Array
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core.conventions._ascending import MUSIC_TRANSFORMER
from relskew_core.conventions._state import FORMS, State, Weights, as_block, note_head_width, read_biases, read_weights


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
        The prefix of the attention in it: ``"transformer.encoder.layers.0.self_attn."``.

    Returns
    -------
    spec : BlockSpec
        Causal.
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    Raises
    ------
    ValueError, TypeError
        If a key is missing, unknown or does not fit the others; the message names it. Two ports never saved their
        table: it was no parameter, and every run drew another one.

    See Also
    --------
    MUSIC_TRANSFORMER : the tables alone.
    relskew_core.attention_block : runs the block.

    Examples
    --------
    The state dict of jason9693's port, of width 8 with two heads and a table of 64 positions:

    >>> import numpy as np
    >>> state = {"E": np.ones((64, 4))}
    >>> for name in ("Wq", "Wk", "Wv", "fc"):
    ...     state |= {f"{name}.weight": np.eye(8), f"{name}.bias": np.zeros(8)}
    >>> spec, weights = load_music_transformer(state, num_heads=2)
    >>> spec.span, spec.causal
    (Span(left=63, right=0, beyond='error'), True)
    >>> from relskew_core import attention_block
    >>> attention_block(np.ones((1, 20, 8)), weights, spec).shape
    (1, 20, 8)
    """
    read = State(state, prefix, "Er", "Wq.weight", "wq.weight", H=check_int("num_heads", num_heads, minimum=1))
    for first, port in (("in_proj_weight", _gwinndr), ("Wq.weight", _jason9693), ("wq.weight", _spectraldoy)):
        if read.has(first):
            weights, span = port(read)
            return as_block(read, weights, span, causal=True)
    raise read.lacks("in_proj_weight, Wq.weight or wq.weight")


def _gwinndr(state: State) -> tuple[Weights, Span]:
    """Cut the packed projections of ``torch.nn.MultiheadAttention`` into three."""
    weights = {"out_proj.weight": state.read("out_proj.weight", "E W")}
    note_head_width(state, "out_proj.weight")
    state.sizes["3W"] = 3 * state.sizes["W"]
    packed = {"weight": state.read("in_proj_weight", "3W E")}
    if state.has("in_proj_bias") or state.has("out_proj.bias"):
        packed["bias"] = state.read("in_proj_bias", "3W")
        weights["out_proj.bias"] = state.read("out_proj.bias", "E")
    width = state.sizes["W"]
    for kind, rows in packed.items():
        for index, name in enumerate(PROJECTIONS[:3]):
            weights[f"{name}.{kind}"] = rows[index * width : (index + 1) * width, ...]
    weights["rel_k"], span = MUSIC_TRANSFORMER.load(state.read("Er", "R D"))
    return weights, span


def _jason9693(state: State) -> tuple[Weights, Span]:
    names = {"q_proj": "Wq", "k_proj": "Wk", "v_proj": "Wv", "out_proj": "fc"}
    weights = read_weights(state, names) | read_biases(state, names)
    weights["rel_k"], span = MUSIC_TRANSFORMER.load(state.read("E", "R D"))
    return weights, span


def _spectraldoy(state: State) -> tuple[Weights, Span]:
    """Split a table with the width of all heads, whose edge row serves further positions."""
    inner = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
    weights = read_weights(state, {**inner, "out_proj": "wo"})
    weights["out_proj.bias"] = state.read("wo.bias", FORMS["out_proj"].split()[0])
    zeros = state.xp.zeros_like(weights["q_proj.weight"][:, 0])
    weights |= read_biases(state, inner) or {f"{name}.bias": zeros for name in inner}
    table = state.read("E.weight", "R W")
    by_head = state.xp.reshape(table, (table.shape[0], state.sizes["H"], state.sizes["D"]))
    weights["rel_k"] = state.xp.moveaxis(by_head, -2, -3)
    return weights, Span(table.shape[0] - 1, 0, "clip")

"""Attentions of speech models as blocks: VITS, Wav2Vec2-BERT and Conformers."""

from __future__ import annotations

from collections.abc import Mapping

from relskew_core._array.checks import check_int
from relskew_core._array.typing import Array
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core.conventions._ascending import SHAW, VITS
from relskew_core.conventions._convention import load_named
from relskew_core.conventions._state import FORMS, State, Weights, as_block, note_head_width, read_biases, read_weights


def load_vits(state: Mapping[str, Array], *, num_heads: int, prefix: str = "") -> tuple[BlockSpec, Weights]:
    """Read the attention of VITS, a window on keys and values: of transformers, or of its authors.

    Piper, Coqui TTS and MeloTTS have the authors' names: ``conv_q``, ``conv_k``, ``conv_v`` and ``conv_o``.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        ``config.num_attention_heads``, or the authors' ``n_heads``.
    prefix : str, default ""
        The prefix of the attention in it: ``"text_encoder.encoder.layers.0.attention."``, or
        ``"enc_p.encoder.attn_layers.0."``.

    Returns
    -------
    spec : BlockSpec
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    See Also
    --------
    VITS : the tables alone.
    relskew_core.attention_block : runs the block.

    Examples
    --------
    The state dict of an attention of width 8 with two heads and a window of four positions on each side:

    >>> import numpy as np
    >>> state = {"emb_rel_k": np.ones((1, 9, 4)), "emb_rel_v": np.ones((1, 9, 4))}
    >>> for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
    ...     state |= {f"{name}.weight": np.eye(8), f"{name}.bias": np.zeros(8)}
    >>> spec, weights = load_vits(state, num_heads=2)
    >>> spec.span, weights["rel_k"].shape
    (Span(left=4, right=4, beyond='zero'), (9, 4))

    The block runs with them in every array library:

    >>> from relskew_core import attention_block
    >>> attention_block(np.ones((1, 20, 8)), weights, spec).shape
    (1, 20, 8)
    """
    read = State(state, prefix, "emb_rel_k", H=check_int("num_heads", num_heads, minimum=1))
    names, axes = {name: name for name in PROJECTIONS}, ""
    if any(read.has(f"conv_{name}.weight") for name in "qkvo"):  # convolutions of a single position
        names, axes = {name: f"conv_{name[0]}" for name in PROJECTIONS}, " 1"
    weights = read_weights(read, names, axes) | read_biases(read, names)
    keys = read.read("emb_rel_k", "1 R D", "H R D")
    values = read.read("emb_rel_v", "1 R D" if keys.shape[0] == 1 else "H R D")
    weights["rel_k"], span = load_named(VITS, read.label("emb_rel_k"), keys)
    weights["rel_v"], _ = load_named(VITS, read.label("emb_rel_v"), values)
    return as_block(read, weights, span)


def load_wav2vec2_bert(
    state: Mapping[str, Array], *, num_heads: int, left: int = 64, right: int = 8, prefix: str = ""
) -> tuple[BlockSpec, Weights]:
    """Read an HF ``Wav2Vec2BertSelfAttention`` with ``position_embeddings_type="relative_key"``.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        ``config.num_attention_heads``.
    left, right : int, default 64, 8
        ``config.left_max_position_embeddings`` and ``config.right_max_position_embeddings``.
    prefix : str, default ""
        The prefix of the attention in it: ``"encoder.layers.0.self_attn."``.

    Returns
    -------
    spec : BlockSpec
    weights : dict of str to array
        For :func:`relskew_core.attention_block` and every export.

    See Also
    --------
    load_conformer : sinusoids instead of clipped distances.
    relskew_core.attention_block : runs the block.

    Examples
    --------
    The state dict of an attention of width 8 with two heads, and a table of ``2 + 1 + 1`` distances:

    >>> import numpy as np
    >>> state = {"distance_embedding.weight": np.ones((4, 4))}
    >>> for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
    ...     state |= {f"{name}.weight": np.eye(8), f"{name}.bias": np.zeros(8)}
    >>> spec, weights = load_wav2vec2_bert(state, num_heads=2, left=2, right=1)
    >>> spec.span
    Span(left=2, right=1, beyond='clip')
    >>> from relskew_core import attention_block
    >>> attention_block(np.ones((1, 20, 8)), weights, spec).shape
    (1, 20, 8)
    """
    left, right = check_int("left", left, minimum=0), check_int("right", right, minimum=0)
    heads = check_int("num_heads", num_heads, minimum=1)
    read = State(state, prefix, "distance_embedding.weight", H=heads, R=left + right + 1)
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "out_proj": "linear_out"}
    weights = read_weights(read, names) | read_biases(read, names)
    weights["rel_k"], span = SHAW.load(read.read("distance_embedding.weight", "R D"), left=left)
    return as_block(read, weights, span)


def load_conformer(state: Mapping[str, Array], *, num_heads: int, prefix: str = "") -> Weights:
    """Read the attention of a Conformer with Transformer-XL's positions, for :class:`ConformerAttention` of torch.

    ESPnet, NeMo, fairseq, ChunkFormer and transformers' Wav2Vec2-Conformer, FastSpeech2-Conformer and SeamlessM4T have
    the same names (``linear_pos``, ``pos_bias_u``); transformers' Parakeet (``relative_k_proj``, ``bias_u``) and
    SpeechBrain (``in_proj_weight``) have others.

    SpeechBrain divides its logits by the root of the width of all heads, and a block by that of one head:
    ``q_proj.weight``, ``u`` and ``w`` are SpeechBrain's, divided by the root of the number of heads. Its sinusoids need
    ``direction="both"``, unless its encoder was made with ``use_legacy_symmetric=False``.

    WeNet and ESPnet's ``rel_pos_type="legacy"`` have the same names, and compute something else.

    Parameters
    ----------
    state : mapping of str to array
        A state dict, of one attention or of a whole model.
    num_heads : int
        Number of heads.
    prefix : str, default ""
        The prefix of the attention in it: ``"encoder.encoders.0.self_attn."``.

    Returns
    -------
    dict of str to array
        For ``ConformerAttention(spec).load_state_dict``, where ``spec.bias`` says whether there are biases.

    See Also
    --------
    load_wav2vec2_bert : clipped distances instead of sinusoids.
    relskew_core.layers.torch.ConformerAttention : takes the weights.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import ConformerAttention
    >>> names = ["linear_q", "linear_k", "linear_v", "linear_out", "linear_pos"]
    >>> original = torch.nn.ModuleDict(
    ...     {name: torch.nn.Linear(8, 8, bias=name != "linear_pos") for name in names}
    ... )
    >>> original.pos_bias_u, original.pos_bias_v = (
    ...     torch.nn.Parameter(torch.randn(2, 4)) for _ in range(2)
    ... )
    >>> attention = ConformerAttention(BlockSpec(8, 2, Span.full(500)))
    >>> attention.load_state_dict(load_conformer(original.state_dict(), num_heads=2))
    <All keys matched successfully>

    An attention of SpeechBrain:

    >>> state = {"in_proj_weight": torch.ones(24, 8), "linear_pos.weight": torch.ones(8, 8)}
    >>> state |= {f"pos_bias_{name}": torch.ones(4, 2) for name in "uv"}
    >>> state |= {"out_proj.weight": torch.ones(8, 8), "out_proj.bias": torch.zeros(8)}
    >>> attention = ConformerAttention(BlockSpec(8, 2, Span.full(500)), direction="both")
    >>> attention.load_state_dict(load_conformer(state, num_heads=2))
    <All keys matched successfully>
    """
    heads = check_int("num_heads", num_heads, minimum=1)
    read = State(state, prefix, "linear_pos.weight", "relative_k_proj.weight", H=heads)
    if read.has("in_proj_weight"):
        return _speechbrain(read)
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "out_proj": "linear_out"}
    positions, biases = "linear_pos", ("pos_bias_u", "pos_bias_v")
    if read.has("relative_k_proj.weight"):
        names = {name: name for name in PROJECTIONS} | {"out_proj": "o_proj"}
        positions, biases = "relative_k_proj", ("bias_u", "bias_v")
    weights = read_weights(read, names) | read_biases(read, names)
    weights["pos_proj.weight"] = read.read(f"{positions}.weight", FORMS["q_proj"])
    for name, other in zip(("u", "w"), biases, strict=True):
        weights[name] = read.read(other, "H D")
    read.finish()
    return weights


def _speechbrain(state: State) -> Weights:
    """Cut the packed projections head by head, and divide the queries by the root of the number of heads."""
    weights = {
        "out_proj.weight": state.read("out_proj.weight", "E W"),
        "out_proj.bias": state.read("out_proj.bias", "E"),
    }
    note_head_width(state, "out_proj.weight")
    width, heads, head_width = (state.sizes[axis] for axis in "WHD")
    state.sizes["3W"] = 3 * width
    packed, xp = state.read("in_proj_weight", "3W E"), state.xp
    by_head = xp.reshape(packed, (heads, 3, head_width, state.sizes["E"]))
    for index, name in enumerate(PROJECTIONS[:3]):
        weights[f"{name}.weight"] = xp.reshape(by_head[:, index, :, :], (width, state.sizes["E"]))
        weights[f"{name}.bias"] = xp.zeros_like(weights[f"{name}.weight"][:, 0])
    if state.has("value_bias_weight"):
        weights["v_proj.bias"] = state.read("value_bias_weight", "W")
    for name, other in (("u", "pos_bias_u"), ("w", "pos_bias_v")):  # their shape is not the order of their numbers
        weights[name] = xp.reshape(state.read(other, "D H"), (heads, head_width))
    for name in ("q_proj.weight", "u", "w"):
        weights[name] = weights[name] * heads**-0.5
    weights["pos_proj.weight"] = state.read("linear_pos.weight", FORMS["q_proj"])
    state.finish()
    return weights

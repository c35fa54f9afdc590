"""Attentions of other code bases as blocks."""

from __future__ import annotations

from typing import Any

from relskew_core._array.checks import check_bool, check_int
from relskew_core._block.spec import PROJECTIONS, BlockSpec
from relskew_core._positions.span import Span
from relskew_core.conventions._buckets import T5
from relskew_core.conventions._convention import load_named
from relskew_core.conventions._state import (
    FORMS,
    State,
    Stored,
    Weights,
    as_block,
    note_head_width,
    read_biases,
    read_weights,
)
from relskew_core.conventions._tables import MUSIC_TRANSFORMER, SHAW, TENSOR2TENSOR_CAUSAL, TENSOR2TENSOR_UNMASKED, VITS


def load_vits(state: Stored, *, num_heads: int, prefix: str = "") -> tuple[BlockSpec, Weights]:
    """Read the attention of VITS, a window on keys and values: of transformers, or of its authors.

    Piper, Coqui TTS and MeloTTS have the authors' names: ``conv_q``, ``conv_k``, ``conv_v`` and ``conv_o``.

    Parameters
    ----------
    state : mapping of str to array, onnx.ModelProto or path
        A state dict, or an ONNX model with its names, of one attention or of a whole model.
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


_VITS_LAYER = {
    "attention.emb_rel_k": ("attn_layers.{}.emb_rel_k", "1 R D"),
    "attention.emb_rel_v": ("attn_layers.{}.emb_rel_v", "1 R D"),
    "layer_norm.weight": ("norm_layers_1.{}.gamma", "E"),
    "layer_norm.bias": ("norm_layers_1.{}.beta", "E"),
    "final_layer_norm.weight": ("norm_layers_2.{}.gamma", "E"),
    "final_layer_norm.bias": ("norm_layers_2.{}.beta", "E"),
    "feed_forward.conv_1.weight": ("ffn_layers.{}.conv_1.weight", "F E K"),
    "feed_forward.conv_1.bias": ("ffn_layers.{}.conv_1.bias", "F"),
    "feed_forward.conv_2.weight": ("ffn_layers.{}.conv_2.weight", "E F K"),
    "feed_forward.conv_2.bias": ("ffn_layers.{}.conv_2.bias", "E"),
} | {
    f"attention.{name}.{kind}": (f"attn_layers.{{}}.conv_{name[0]}.{kind}", form)
    for name in PROJECTIONS
    for kind, form in (("weight", "E E 1"), ("bias", "E"))
}


def load_vits_encoder(state: Stored, *, prefix: str = "") -> tuple[dict[str, Any], Weights]:
    """Read a whole text encoder of VITS' authors, Piper or Coqui TTS, for the ``VitsTextEncoder`` of transformers.

    Encoders with further inputs, such as MeloTTS' tones and speakers, have no equal in transformers, and raise an error
    with the names of what is left; ``docs/piper.md`` replaces their attention with :func:`load_vits`.

    Parameters
    ----------
    state : mapping of str to array, onnx.ModelProto or path
        A state dict of the encoder or of a whole voice, or a voice in ONNX, as Piper has them.
    prefix : str, default ""
        The prefix of the encoder in it, such as ``"enc_p."``. A single encoder is found without.

    Returns
    -------
    config : dict
        The arguments of ``VitsConfig``. The number of heads follows from the width of the tables. With
        ``attn_implementation="eager"``, transformers hides padding; an encoder without it ignores its attention mask.
    weights : dict of str to array
        For ``VitsTextEncoder.load_state_dict``, as arrays of the library of ``state``, NumPy for ONNX.

    Examples
    --------
    The state of a voice with one layer of width 8:

    >>> import numpy as np
    >>> state = {"emb.weight": np.ones((30, 8)), "proj.weight": np.ones((12, 8, 1))}
    >>> state["proj.bias"] = np.ones(12)
    >>> for name in ("k", "v"):
    ...     state[f"encoder.attn_layers.0.emb_rel_{name}"] = np.ones((1, 9, 4))
    >>> for name in "qkvo":
    ...     state[f"encoder.attn_layers.0.conv_{name}.weight"] = np.ones((8, 8, 1))
    ...     state[f"encoder.attn_layers.0.conv_{name}.bias"] = np.ones(8)
    >>> for name, shape in [("conv_1", (16, 8, 3)), ("conv_2", (8, 16, 3))]:
    ...     state[f"encoder.ffn_layers.0.{name}.weight"] = np.ones(shape)
    ...     state[f"encoder.ffn_layers.0.{name}.bias"] = np.ones(shape[0])
    >>> for name in ("norm_layers_1", "norm_layers_2"):
    ...     state |= {f"encoder.{name}.0.{kind}": np.ones(8) for kind in ("gamma", "beta")}
    >>> config, weights = load_vits_encoder({f"enc_p.{key}": x for key, x in state.items()})
    >>> config["num_attention_heads"], config["window_size"], config["ffn_dim"]
    (2, 4, 16)
    >>> weights["encoder.layers.0.attention.q_proj.weight"].shape
    (8, 8)
    """
    mark = "encoder.attn_layers.0.emb_rel_k"
    read = State(state, prefix, mark)
    _, span = load_named(VITS, read.label(mark), read.read(mark, "1 R D"))
    depth, weights = 0, {"project.weight": read.read("proj.weight", "P E 1")}
    weights["project.bias"] = read.read("proj.bias", "P")
    while read.has(f"encoder.attn_layers.{depth}.emb_rel_k"):
        for name, (other, form) in _VITS_LAYER.items():
            array = read.read(f"encoder.{other.format(depth)}", form)
            weights[f"encoder.layers.{depth}.{name}"] = array[..., 0] if form == "E E 1" else array
        depth += 1
    # torch's exporter named Piper's embedding after an argument that voices of one speaker do not have
    unnamed = not read.has("emb.weight") and "sid" in read.arrays
    weights["embed_tokens.weight"] = read.read("sid", "V E", prefix="") if unnamed else read.read("emb.weight", "V E")
    read.finish("; docs/piper.md replaces the attention of encoders with further inputs, such as those of MeloTTS")
    sizes = read.sizes
    if sizes["E"] % sizes["D"]:
        raise ValueError(
            f"`{read.label(mark)}` must have the width of a head, a divisor of {sizes['E']}, got {sizes['D']}"
        )
    return {
        "attn_implementation": "eager", "vocab_size": sizes["V"], "hidden_size": sizes["E"], "num_hidden_layers": depth,
        "num_attention_heads": sizes["E"] // sizes["D"], "window_size": span.left, "ffn_dim": sizes["F"],
        "ffn_kernel_size": sizes["K"], "flow_size": sizes["P"] // 2,
    }, weights  # fmt: skip


def load_wav2vec2_bert(
    state: Stored, *, num_heads: int, left: int = 64, right: int = 8, prefix: str = ""
) -> tuple[BlockSpec, Weights]:
    """Read an HF ``Wav2Vec2BertSelfAttention`` with ``position_embeddings_type="relative_key"``.

    Parameters
    ----------
    state, num_heads, prefix
        As in :func:`load_vits`; the prefix is, for example, ``"encoder.layers.0.self_attn."``.
    left, right : int, default 64, 8
        ``config.left_max_position_embeddings`` and ``config.right_max_position_embeddings``.

    Returns
    -------
    spec, weights
        As from :func:`load_vits`.

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
    """
    left, right = check_int("left", left, minimum=0), check_int("right", right, minimum=0)
    heads = check_int("num_heads", num_heads, minimum=1)
    read = State(state, prefix, "distance_embedding.weight", H=heads, R=left + right + 1)
    names = {"q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v", "out_proj": "linear_out"}
    weights = read_weights(read, names) | read_biases(read, names)
    weights["rel_k"], span = SHAW.load(read.read("distance_embedding.weight", "R D"), left=left)
    return as_block(read, weights, span)


def load_conformer(state: Stored, *, num_heads: int, prefix: str = "") -> Weights:
    """Read the attention of a Conformer with Transformer-XL's positions, for :class:`ConformerAttention` of torch.

    ESPnet, NeMo, fairseq, ChunkFormer and transformers' Wav2Vec2-Conformer, FastSpeech2-Conformer and SeamlessM4T have
    the same names (``linear_pos``, ``pos_bias_u``); transformers' Parakeet (``relative_k_proj``, ``bias_u``), NeMo's
    ``TransformerEncoder`` (``w_qkv``) and SpeechBrain (``in_proj_weight``) have others.

    SpeechBrain divides its logits by the root of the width of all heads, and a block by that of one head:
    ``q_proj.weight``, ``u`` and ``w`` are SpeechBrain's, divided by the root of the number of heads. Its sinusoids need
    ``direction="both"``, unless its encoder was made with ``use_legacy_symmetric=False``.

    WeNet and ESPnet's ``rel_pos_type="legacy"`` have the same names, and compute something else. ESPnet's legacy
    positions count from ``max_len``, or from the longest input so far: the row of a key at its query is that of
    ``max_len`` minus the length of the batch. No table has them all, but ``replace_attention`` replaces them.

    Parameters
    ----------
    state, num_heads, prefix
        As in :func:`load_vits`; the prefix is, for example, ``"encoder.encoders.0.self_attn."``.

    Returns
    -------
    dict of str to array
        For ``ConformerAttention(spec).load_state_dict``, where ``spec.bias`` says whether there are biases.

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
    if read.has("in_proj_weight") or read.has("w_qkv.weight"):
        return _packed(read)
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


def _packed(state: State) -> Weights:
    """Cut packed projections: NeMo's one after the other, and SpeechBrain's by head, with the scale of all heads."""
    weights = {
        "out_proj.weight": state.read("out_proj.weight", "E W"),
        "out_proj.bias": state.read("out_proj.bias", "E"),
    }
    note_head_width(state, "out_proj.weight")
    width, heads, head_width = (state.sizes[axis] for axis in "WHD")
    state.sizes["3W"], nemo = 3 * width, state.has("w_qkv.weight")
    packed, xp = state.read("w_qkv.weight" if nemo else "in_proj_weight", "3W E"), state.xp
    cut = xp.reshape(packed, (1 if nemo else heads, 3, -1, state.sizes["E"]))
    bias = xp.reshape(state.read("w_qkv.bias", "3W"), (3, width)) if state.has("w_qkv.bias") else None
    for index, name in enumerate(PROJECTIONS[:3]):
        weights[f"{name}.weight"] = xp.reshape(cut[:, index, :, :], (width, state.sizes["E"]))
        weights[f"{name}.bias"] = xp.zeros_like(packed[:width, 0]) if bias is None else bias[index, :]
    if state.has("value_bias_weight"):
        weights["v_proj.bias"] = state.read("value_bias_weight", "W")
    for name, other in (("u", "pos_bias_u"), ("w", "pos_bias_v")):  # SpeechBrain's shape is not that of their numbers
        weights[name] = xp.reshape(state.read(other, "H D" if nemo else "D H"), (heads, head_width))
    for name in () if nemo else ("q_proj.weight", "u", "w"):
        weights[name] = weights[name] * heads**-0.5
    weights["pos_proj.weight"] = state.read("linear_pos.weight", FORMS["q_proj"])
    state.finish()
    return weights


def load_tensor2tensor(
    state: Stored, *, num_heads: int, causal: bool, block_size: int | None = None, prefix: str = ""
) -> tuple[BlockSpec, Weights]:
    """Read a ``multihead_attention`` of tensor2tensor: Shaw's ``dot_product_relative`` or the relative version 2.

    Parameters
    ----------
    state, num_heads, prefix
        As in :func:`load_vits`: variables, converted to one array library, up to ``"multihead_attention/"``.
    causal : bool
        A decoder's self-attention.
    block_size : int, optional
        Of Music Transformer's local attention.

    Returns
    -------
    spec, weights
        As from :func:`load_vits`, without biases: tensor2tensor has none.

    Examples
    --------
    The variables of a decoder's attention of width 8 with two heads, in the version of Shaw et al.:

    >>> import numpy as np
    >>> scope = "body/layer_0/self_attention/multihead_attention/"
    >>> names = ("q", "k", "v", "output_transform")
    >>> state = {f"{scope}{name}/kernel": np.eye(8) for name in names}
    >>> for role in ("keys", "values"):
    ...     state[f"{scope}relative_positions_{role}/embeddings"] = np.ones((33, 4))
    >>> spec, weights = load_tensor2tensor(state, num_heads=2, causal=True, prefix=scope)
    >>> spec.span, spec.rel_values
    (Span(left=16, right=16, beyond='clip'), True)
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
    state: Stored,
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
    state, num_heads, prefix
        As in :func:`load_vits`; the prefix is, for example, ``"encoder.block.3.layer.0.SelfAttention."``.
    bidirectional : bool
        Encoder (True) or decoder.
    num_buckets, max_distance : int, default 32, 128
        ``config.relative_attention_num_buckets`` and ``config.relative_attention_max_distance``.
    bias_prefix : str, optional
        The prefix of the layer that has ``relative_attention_bias``, the stack's first; ``prefix`` by default.

    Returns
    -------
    spec, weights
        As from :func:`load_vits`, without biases of projections, and with ``rel_bias``.

    Examples
    --------
    The state dict of an encoder's first attention, of width 8 with two heads:

    >>> import numpy as np
    >>> state = {f"{name}.weight": np.eye(8) for name in "qkvo"}
    >>> state["relative_attention_bias.weight"] = np.ones((32, 2))
    >>> spec, weights = load_t5(state, num_heads=2, bidirectional=True)
    >>> spec.rel_bias, weights["rel_bias"].shape
    (True, (2, 257))
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


def load_music_transformer(state: Stored, *, num_heads: int, prefix: str = "") -> tuple[BlockSpec, Weights]:
    """Read the attention of a PyTorch port of Music Transformer.

    Known are ``in_proj_weight, out_proj, Er`` (gwinndr), ``Wq, Wk, Wv, fc, E`` (jason9693) and ``wq, wk, wv, wo,
    E.weight`` (spectraldoy; a table for each head, clipped).

    Parameters
    ----------
    state, num_heads, prefix
        As in :func:`load_vits`; the prefix is, for example, ``"transformer.encoder.layers.0.self_attn."``.

    Returns
    -------
    spec, weights
        As from :func:`load_vits`; the block is causal.

    Raises
    ------
    ValueError, TypeError
        If a key is missing, unknown or does not fit the others; the message names it. Two ports never saved their
        table: it was no parameter, and every run drew another one.

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

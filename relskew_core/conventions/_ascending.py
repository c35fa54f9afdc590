"""Tables whose rows ascend from the past to the future, as here."""

from __future__ import annotations

from relskew_core.conventions._convention import Convention

VITS = Convention(
    "VITS",
    order="ascending",
    reach="odd",
    beyond="zero",
    shared_axis=True,
    text="""VITS, HF ``VitsAttention``, Piper: a window ``±w`` around the query, zero outside.

    ::

        row   0 …  w … 2w
        rel  -w …  0 …  w

    Tables ``emb_rel_k`` and ``emb_rel_v`` of shape ``(1, 2w + 1, D)`` or ``(H, 2w + 1, D)``; a first axis of 1 is one
    table for all heads, and comes and goes.

    >>> import numpy as np
    >>> table, span = VITS.load(np.zeros((1, 9, 96)))
    >>> table.shape, span
    ((9, 96), Span(left=4, right=4, beyond='zero'))
    """,
)

TENSOR2TENSOR_CAUSAL = Convention(
    "tensor2tensor's causal relative attention",
    order="ascending",
    reach="past",
    beyond="zero",
    text="""tensor2tensor's relative attention version 2, causal: zero beyond the table.

    ::

        row       0 … n-1
        rel  -(n-1) …   0

    Tables ``key_relative_embeddings`` and ``value_relative_embeddings`` of ``n`` rows.

    >>> import numpy as np
    >>> TENSOR2TENSOR_CAUSAL.load(np.zeros((5, 2)))[1]
    Span(left=4, right=0, beyond='zero')
    """,
)

TENSOR2TENSOR_UNMASKED = Convention(
    "tensor2tensor's unmasked relative attention",
    order="ascending",
    reach="odd",
    beyond="zero",
    text="""tensor2tensor's relative attention version 2, unmasked: zero beyond the table.

    ::

        row       0 … n-1 … 2n-2
        rel  -(n-1) …   0 …  n-1

    Tables ``key_relative_embeddings`` and ``value_relative_embeddings`` of ``2n - 1`` rows.

    >>> import numpy as np
    >>> TENSOR2TENSOR_UNMASKED.load(np.zeros((5, 2)))[1]
    Span(left=2, right=2, beyond='zero')
    """,
)

SHAW = Convention(
    "Shaw et al.",
    order="ascending",
    reach="any",
    beyond="clip",
    text="""Shaw et al., tensor2tensor's version 1, fairseq2, CTranslate2, Wav2Vec2-BERT: clipped.

    ::

        row   0 … left … left + right
        rel  -left … 0 … right            and the edge rows for everything further away

    Row ``clip(rel, -left, right) + left``. Without ``left``, the ``2k + 1`` rows are ``-k … k``.

    >>> import numpy as np
    >>> SHAW.load(np.zeros((73, 2)), left=64)[1]
    Span(left=64, right=8, beyond='clip')
    """,
)

MUSIC_TRANSFORMER = Convention(
    "Music Transformer",
    order="ascending",
    reach="past",
    beyond="error",
    text="""Music Transformer's ``E_r`` (Huang et al. and its ports): the past only.

    ::

        row       0 … n-1
        rel  -(n-1) …   0

    >>> import numpy as np
    >>> MUSIC_TRANSFORMER.load(np.zeros((2048, 64)))[1]
    Span(left=2047, right=0, beyond='error')
    """,
)

TRANSFORMER_XL = Convention(
    "Transformer-XL",
    order="ascending",
    reach="any",
    beyond="error",
    text="""Transformer-XL, XLNet and the Conformers (ESPnet, NeMo, SpeechBrain, HF): sinusoids after their projection.

    Their *contents* descend, from the sinusoid of the furthest past to that of the furthest future, and so their
    *rows* ascend in ``rel``. Nothing is to be flipped::

        sinusoid of query - key   n-1 … 0 … -(n-1)
        row                         0 …      2n-2
        rel                    -(n-1) … 0 …   n-1

    Without ``left`` the ``2n - 1`` rows are a Conformer's. Transformer-XL's with a memory are the past only,
    ``left = n_keys - 1`` of ``n_keys`` rows. XLNet has one row more before them, ``left = n_keys`` of
    ``n_keys + n_queries`` rows, of which the first serves none of its queries.

    >>> import numpy as np
    >>> TRANSFORMER_XL.load(np.zeros((7, 2)))[1]
    Span(left=3, right=3, beyond='error')
    >>> TRANSFORMER_XL.load(np.zeros((7, 2)), left=6)[1]
    Span(left=6, right=0, beyond='error')
    >>> TRANSFORMER_XL.load(np.zeros((7, 2)), left=4)[1]  # XLNet: 4 keys, 3 queries
    Span(left=4, right=2, beyond='error')
    """,
)

__test__ = {name: value.__doc__ for name, value in list(vars().items()) if isinstance(value, Convention)}

"""Tables by relative position: rows that ascend from the past to the future, as here, or descend and are flipped."""

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

UKHOV = Convention(
    "the diagonal form",
    order="descending",
    reach="odd",
    beyond="error",
    text="""The diagonal form (I. Ukhov): from the future to the past.

    ::

        row    0 … n-1 …   2n-2
        rel  n-1 …   0 … -(n-1)

    >>> import numpy as np
    >>> UKHOV.load(np.asarray([[1.0], [0.0], [-1.0]]))[0][:, 0]
    array([-1.,  0.,  1.])
    """,
)

DISTANCE = Convention(
    "distances query - key",
    order="descending",
    reach="odd",
    beyond="error",
    text="""By distance ``query - key``: Lingvo, HF BERT's ``relative_key``, Granite Speech, SAM, ViTDet, MViT.

    The same rows as ``UKHOV``, said otherwise::

        row           0 … n-1 …   2n-2
        query - key  -(n-1) … 0 …  n-1
        rel         n-1 …     0 … -(n-1)

    Tables ``distance_embedding.weight``, ``rel_pos_h``, ``rel_pos_w`` … SAM, ViTDet and MViT resize their tables:
    see ``resize_table``.

    >>> import numpy as np
    >>> DISTANCE.load(np.asarray([[1.0], [0.0], [-1.0]]))[0][:, 0]
    array([-1.,  0.,  1.])
    """,
)

SPEECHT5 = Convention(
    "SpeechT5",
    order="descending",
    reach="even",
    beyond="clip",
    text="""SpeechT5: clipped distances ``query - key`` from ``-m`` to ``m - 1``, an even number of rows.

    ::

        row           0 … m …   2m-1
        query - key  -m … 0 …    m-1
        rel           m … 0 … -(m-1)      and the edge rows for everything further away

    The table is ``pe_k.weight`` of the encoder's relative positional encoding.

    >>> import numpy as np
    >>> SPEECHT5.load(np.zeros((320, 2)))[1]
    Span(left=159, right=160, beyond='clip')
    """,
)

INKLING = Convention(
    "Inkling",
    order="descending",
    reach="past",
    beyond="zero",
    text="""Inkling: how far back a key lies, zero beyond the extent.

    ::

        row  0    1 …   extent-1
        rel  0   -1 … -(extent-1)

    >>> import numpy as np
    >>> table, span = INKLING.load(np.asarray([[0.0], [-1.0], [-2.0]]))
    >>> table[:, 0], span
    (array([-2., -1.,  0.]), Span(left=2, right=0, beyond='zero'))
    """,
)

__test__ = {name: value.__doc__ for name, value in list(vars().items()) if isinstance(value, Convention)}

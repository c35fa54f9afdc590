"""Tables whose rows descend, from the future to the past; they are flipped when they are loaded or stored."""

from __future__ import annotations

from relskew_core.conventions._convention import Convention

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

"""Tables and weights of other code bases: ``from_…`` brings them here, ``to_…`` brings them back.

Here a table's rows are relative positions ``rel = key - query`` in ascending order, and a :class:`~relskew_core.Span`
says which. Others count otherwise:

=============================================  ======================================================================
whose                                          row of ``rel``
=============================================  ======================================================================
:func:`from_vits`                              ``rel + w``; VITS, Piper: zero outside
:func:`from_tensor2tensor`                     ``rel + n - 1``, causal or unmasked: zero outside
:func:`from_shaw`                              ``clip(rel, -l, r) + l``; fairseq2, CTranslate2, Wav2Vec2-BERT
:func:`from_music_transformer`                 ``rel + n - 1``, ``rel <= 0``
:func:`from_transformer_xl`                    ``rel + n - 1``; only the sinusoids in it descend; XLNet, Conformers
:func:`from_ukhov`                             ``n - 1 - rel``
:func:`from_distance`                          ``(query - key) + n - 1``; Lingvo, SAM, ViTDet, MViT, HF BERT
:func:`from_speecht5`                          ``clip(query - key, -m, m - 1) + m``
:func:`from_inkling`                           ``-rel``, zero beyond the extent
:func:`from_t5`, :func:`from_deberta`          shared rows that grow with the distance
:func:`from_swin`, :func:`from_beit`           a window's cells, flattened, by distance
=============================================  ======================================================================

The ``load_…`` functions read whole attentions from state dicts: :func:`load_vits`, :func:`load_wav2vec2_bert`,
:func:`load_tensor2tensor` and :func:`load_music_transformer` into a spec and weights of an attention block,
:func:`load_t5` into projections and a bias.
"""

from relskew_core.conventions._bias import (
    from_beit,
    from_deberta,
    from_swin,
    from_t5,
    to_beit,
    to_deberta,
    to_swin,
    to_t5,
)
from relskew_core.conventions._flipped import (
    from_distance,
    from_inkling,
    from_speecht5,
    from_ukhov,
    to_distance,
    to_inkling,
    to_speecht5,
    to_ukhov,
)
from relskew_core.conventions._rows import (
    from_music_transformer,
    from_shaw,
    from_tensor2tensor,
    from_transformer_xl,
    from_vits,
    to_music_transformer,
    to_shaw,
    to_tensor2tensor,
    to_transformer_xl,
    to_vits,
)
from relskew_core.conventions._weights import (
    load_music_transformer,
    load_t5,
    load_tensor2tensor,
    load_vits,
    load_wav2vec2_bert,
)

__all__ = [
    "from_beit",
    "from_deberta",
    "from_distance",
    "from_inkling",
    "from_music_transformer",
    "from_shaw",
    "from_speecht5",
    "from_swin",
    "from_t5",
    "from_tensor2tensor",
    "from_transformer_xl",
    "from_ukhov",
    "from_vits",
    "load_music_transformer",
    "load_t5",
    "load_tensor2tensor",
    "load_vits",
    "load_wav2vec2_bert",
    "to_beit",
    "to_deberta",
    "to_distance",
    "to_inkling",
    "to_music_transformer",
    "to_shaw",
    "to_speecht5",
    "to_swin",
    "to_t5",
    "to_tensor2tensor",
    "to_transformer_xl",
    "to_ukhov",
    "to_vits",
]

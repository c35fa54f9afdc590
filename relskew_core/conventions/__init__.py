"""Tables and weights of other code bases: ``load`` converts them to those of relskew, ``store`` converts them back.

Here a table's rows are relative positions ``rel = key - query`` in ascending order, and a :class:`~relskew_core.Span`
says which. Others count otherwise. Each of these values is one of their ways, with its rows drawn: ``help(VITS)`` or
``print(VITS)`` shows them, ``VITS.load(table)`` gives ``(table, span)``, and ``VITS.store(table, span)`` converts them
back. :class:`T5`, :class:`DeBERTa`, :class:`Swin` and :class:`BEiT` need numbers that their tables do not show, and are
made with them; :class:`Convention` is any other, of rows ascending or descending.

=============================================  ======================================================================
code base                                      row of ``rel``
=============================================  ======================================================================
``VITS``                                       ``rel + w``; VITS, Piper: zero outside
``TENSOR2TENSOR_CAUSAL``                       ``rel + n - 1``, ``rel <= 0``: zero outside
``TENSOR2TENSOR_UNMASKED``                     ``rel + n - 1``: zero outside
``SHAW``                                       ``clip(rel, -l, r) + l``; fairseq2, CTranslate2, Wav2Vec2-BERT
``MUSIC_TRANSFORMER``                          ``rel + n - 1``, ``rel <= 0``
``TRANSFORMER_XL``                             ``rel + n - 1``; only the sinusoids in it descend; XLNet, Conformers
``UKHOV``                                      ``n - 1 - rel``
``DISTANCE``                                   ``(query - key) + n - 1``; Lingvo, SAM, ViTDet, MViT, HF BERT
``SPEECHT5``                                   ``clip(query - key, -m, m - 1) + m``
``INKLING``                                    ``-rel``, zero beyond the extent
=============================================  ======================================================================

The ``load_…`` functions read whole attentions from state dicts into a spec and weights of an attention block:
:func:`load_vits`, :func:`load_wav2vec2_bert`, :func:`load_tensor2tensor`, :func:`load_music_transformer` and
:func:`load_t5`; :func:`load_conformer` reads the weights of a ``ConformerAttention``, and :func:`load_vits_encoder` a
whole text encoder.
"""

from relskew_core.conventions._buckets import T5, DeBERTa
from relskew_core.conventions._cells import BEiT, Swin
from relskew_core.conventions._convention import Convention
from relskew_core.conventions._load import (
    load_conformer,
    load_music_transformer,
    load_t5,
    load_tensor2tensor,
    load_vits,
    load_vits_encoder,
    load_wav2vec2_bert,
)
from relskew_core.conventions._tables import (
    DISTANCE,
    INKLING,
    MUSIC_TRANSFORMER,
    SHAW,
    SPEECHT5,
    TENSOR2TENSOR_CAUSAL,
    TENSOR2TENSOR_UNMASKED,
    TRANSFORMER_XL,
    UKHOV,
    VITS,
)

__all__ = [
    "DISTANCE", "INKLING", "MUSIC_TRANSFORMER", "SHAW", "SPEECHT5", "T5", "TENSOR2TENSOR_CAUSAL",
    "TENSOR2TENSOR_UNMASKED", "TRANSFORMER_XL", "UKHOV", "VITS", "BEiT", "Convention", "DeBERTa", "Swin",
    "load_conformer", "load_music_transformer", "load_t5", "load_tensor2tensor", "load_vits", "load_vits_encoder",
    "load_wav2vec2_bert",
]  # fmt: skip

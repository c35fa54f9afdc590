"""The published algorithms of relative attention: literal, slow, cited.

Read them along with the papers, and test against them: each equals a call of the package's functions, which need less
memory and have fewer restrictions.

==============================================  ==================================  ====================================
algorithm                                       memory beyond input and output      the same as
==============================================  ==================================  ====================================
:func:`clipped_lookup`                          the gathered table, ``O(n·m·D)``    ``Span.clipped(k)``
:func:`shaw_logits`, :func:`shaw_values`        ``O(B·H·n·m·D)``, or                ``relative_logits``, ``_values``
                                                ``O(B·H·n·m + n·m·D)`` in two
                                                products
:func:`shaw_attention`                          that of its form                    ``relative_attention``
:func:`huang_mask`, :func:`huang_skew`          ``O(H·L²)``                         ``skew``, on and below the diagonal
:func:`huang_skew_local`                        ``O(H·N²)`` a block                 ``skew``
:func:`huang_logits`                            ``O(H·L²)``                         ``relative_logits(causal=True)``
:func:`huang_attention`                         ``O(H·L²)``                         ``relative_attention(causal=True)``
:func:`huang_local_attention`                   ``O(H·L·N)``                        ``relative_attention(block_size=N)``
:func:`diagonal_skew`                           ``O(H·n·T)``                        ``skew`` of the columns reversed
:func:`diagonal_logits`                         ``O(H·n·T)``                        ``relative_logits`` of rows reversed
:func:`diagonal_attention`                      ``O(H·n·T)``                        ``relative_attention`` likewise
==============================================  ==================================  ====================================

References
----------
P. Shaw, J. Uszkoreit, A. Vaswani 2018, "Self-Attention with Relative Position Representations", arXiv:1803.02155.

C.-Z. A. Huang et al. 2018, "Music Transformer: Generating Music with Long-Term Structure", arXiv:1809.04281.

I. Ukhov 2024, "Relative positional embedding for any attention mechanism", blog.ivanukhov.com.
"""

from relskew_core.papers._algorithms import (
    clipped_distances,
    clipped_lookup,
    diagonal_attention,
    diagonal_logits,
    diagonal_skew,
    huang_attention,
    huang_local_attention,
    huang_logits,
    huang_mask,
    huang_skew,
    huang_skew_local,
    shaw_attention,
    shaw_logits,
    shaw_values,
)

__all__ = [
    "clipped_distances", "clipped_lookup", "diagonal_attention", "diagonal_logits", "diagonal_skew",
    "huang_attention", "huang_local_attention", "huang_logits", "huang_mask", "huang_skew", "huang_skew_local",
    "shaw_attention", "shaw_logits", "shaw_values",
]  # fmt: skip

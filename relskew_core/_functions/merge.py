"""The merge of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

from relskew_core._array.checks import describe
from relskew_core._array.keywords import explains
from relskew_core._array.namespace import check_companion, namespace_of_arrays
from relskew_core._array.softmax import as_sums, log_sum_exp
from relskew_core._array.typing import Array
from relskew_core._kernel.merge import merged


@explains
def merge_attention(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union (ring attention, split keys).

    Parameters
    ----------
    outs : sequence of array, shape (..., Lq, Dv)
        Outputs of :func:`relative_attention` for the same queries.
    lses : sequence of array, shape (..., Lq)
        Their log-sum-exps.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        In the dtype of ``outs``.
    lse : array, shape (..., Lq)
        In the dtype of ``lses``. If no part sees a key, the output is zero and the log-sum-exp is ``-inf``.

    Raises
    ------
    ValueError, TypeError
        If the sequences are empty, differ in length, or their arrays do not fit; the message names the argument.

    See Also
    --------
    relative_attention : with ``return_lse=True`` it gives the parts.

    Notes
    -----
    A log-sum-exp is rounded, in float32 by up to 6e-8 of its size, and the shares of the parts are wrong by as much: by
    6e-6 if it is 100, and by 6e-4 if it is 1e4. From 1e8 on, as where an additive mask of -1e9 hides all keys, it does
    not hold how many keys a part has, and equal ones get the same share. Calls with all keys, their gradients without
    ``lse``, dask's blocks, and sequences that are split over devices do not depend on this number.

    Examples
    --------
    >>> import numpy as np
    >>> outs = [np.asarray([[1.0]]), np.asarray([[4.0]])]
    >>> lses = [np.log([1.0]), np.log([2.0])]
    >>> merge_attention(outs, lses)
    (array([[3.]]), array([1.09861229]))
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"`outs` and `lses` must have the same length, at least 1, got {len(outs)} and {len(lses)}")
    xp = namespace_of_arrays({f"outs[{index}]": out for index, out in enumerate(outs)})
    namespace_of_arrays({f"lses[{index}]": lse for index, lse in enumerate(lses)})
    check_companion("lses[0]", lses[0], "outs[0]", outs[0], xp=xp)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(out.shape) != tuple(outs[0].shape) or out.ndim < 2:
            raise ValueError(f"`outs[{index}]` must have the shape (..., Lq, Dv) of `outs[0]`, got {describe(out)}")
        if tuple(lse.shape) != tuple(out.shape[:-1]):
            raise ValueError(f"`lses[{index}]` must have shape {tuple(out.shape[:-1])}, got {describe(lse)}")
    out, sums = merged(outs, [as_sums(lse, xp=xp) for lse in lses], xp=xp)
    return out, log_sum_exp(sums)


def _listed(name: str, arrays: Sequence[Array]) -> list[Array]:
    try:
        return list(arrays)
    except (TypeError, NotImplementedError):  # the second is raised by a memoryview
        raise TypeError(f"`{name}` must be a sequence of arrays, got {describe(arrays)}") from None

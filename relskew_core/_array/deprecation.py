"""Deprecation: a public name first warns, and is removed in the version that the warning names."""

from relskew_core._array.warned import warn_caller


def warn_deprecated(what: str, *, since: str, removed_in: str, instead: str) -> None:
    """Warn at the line of the user's code that calls what is deprecated.

    ``tests/project/test_deprecations.py`` reads the versions, so write them out.

    Parameters
    ----------
    what : str
        The function or argument as a user writes it.
    since, removed_in : str
        The version that warns first, and the one in which it is gone.
    instead : str
        What to use.

    Examples
    --------
    >>> def old():
    ...     warn_deprecated("`old`", since="0.3", removed_in="0.5", instead="`new`")
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     old()
    >>> print(caught[0].message)
    `old` is deprecated since relskew-core 0.3 and will be removed in 0.5: use `new`
    """
    message = f"{what} is deprecated since relskew-core {since} and will be removed in {removed_in}: use {instead}"
    warn_caller(message, DeprecationWarning)

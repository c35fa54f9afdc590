"""Reports a missing ``backends`` or ``export`` folder before an import from it fails with an obscure error."""

from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _has_backends() -> bool:
    """Whether ``backends`` is in the package, directly, by a link, or mapped by an editable install."""
    if (_HERE / "backends").is_dir():
        return True
    found = find_spec("relskew_core.backends")
    return found is not None and Path(str(found.origin)).resolve().parents[1] in (_HERE, _HERE.parent)


if not _has_backends():
    raise ImportError(
        f"{_HERE / 'backends'} must be a link to the folder backends/ next to relskew_core, and export one to export/. "
        "Here they are text files or missing, as zip archives and sdists are unpacked. Install the project with pip "
        "(to work on it: pip install --editable .), or clone it with git clone -c core.symlinks=true"
    )

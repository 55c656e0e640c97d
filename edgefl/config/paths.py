"""Paths in a run file: relative to the file's own folder, so that it can be used from anywhere.

Files from before that were written for the working directory still work from there, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_LOG = logging.getLogger(__name__)


def beside(values: dict[str, Any], file: Path, shipped: Callable[[str], Collection[str]]) -> dict[str, Any]:
    """The values of the run file ``file`` with its paths made absolute; names of what is shipped stay names.

    ``shipped``: names of the profiles of a kind.
    """
    folder = file.parent
    found = dict(values)
    if isinstance(data := values.get("data"), dict):
        found["data"] = {
            key: _path(value, folder, f"data.{key}") if key in {"source", "test"} else value
            for key, value in data.items()
        }
    if "recipe" in values:
        found["recipe"] = _path(values["recipe"], folder, "recipe", shipped("recipes"))
    if isinstance(fleet := values.get("fleet"), list):
        names = shipped("devices")
        found["fleet"] = [_device(device, folder, f"fleet.{i}.profile", names) for i, device in enumerate(fleet)]
    return found


def _device(device: Any, folder: Path, field: str, names: Collection[str]) -> Any:
    if not isinstance(device, dict) or "profile" not in device:
        return device
    return {**device, "profile": _path(device["profile"], folder, field, names)}


def _path(value: Any, folder: Path, field: str, names: Collection[str] = ()) -> Any:
    """The path of what is there; a value that is no path, or a name, as it is."""
    if not isinstance(value, str) or not value or value in names or Path(value).is_absolute():
        return value
    try:
        own = (folder / value).absolute()
        if own.exists():
            return str(own)
        if Path(value).exists():
            _LOG.warning(
                "%s: there is no %s, and %r is taken from the working directory; paths of a run file are relative to "
                "the file",
                field, own, value,
            )  # fmt: skip
            return str(Path(value).absolute())
    except (OSError, ValueError):  # a name that no file can have
        return value
    named = "/" in value or own.suffix in {".npz", ".yaml", ".yml"}
    return str(own) if named else value

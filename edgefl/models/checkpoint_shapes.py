"""Shapes of the tensors in a checkpoint's files, from their headers alone."""

from __future__ import annotations

import re
from pathlib import Path

from edgefl.errors import ModelError
from edgefl.models.tensor_names import stable_name

#: A block's place in its list, and its tensor's name.
_IN_BLOCK = re.compile(r"(?:^|.*\.)(?:layers?|blocks|h)\.(\d+)\.(.+)$")


def place_of(name: str, first: int) -> tuple[int, str]:
    """(place of its block in the encoder, name inside it) of a part's tensor; -1: of no block."""
    inside = re.fullmatch(r"blocks\.(\d+)\.(?:block\.)?(.+)", name)
    return (first + int(inside[1]), inside[2]) if inside else (-1, name.removeprefix("model."))


def stored_shapes(folder: str) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    """Name inside its block -> (the block's place, -1 of none; shape), of a folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else ():
        try:
            with safe_open(path, framework="np") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}", remedy="Copy the checkpoint's folder again.") from error
        for name, shape in shapes.items():
            inside = _IN_BLOCK.match(stable_name(name))
            place, inner = (int(inside[1]), inside[2]) if inside else (-1, stable_name(name))
            found.setdefault(inner, []).append((place, shape))
    return found

"""Properties of the encoders that reading their samples needs, and the shapes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from edgefl.records import TableColumn


class Encoder(Protocol):
    """Properties of a modality's encoder that reading needs; ``edgefl.models.spec.EncoderSpec`` is one.

    ``input_shape`` (): not known, taken from the data.
    """

    @property
    def kind(self) -> str: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def pretrained(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def config(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def source_rate(self) -> float: ...
    @property
    def crop(self) -> Literal["stretch", "center"]: ...
    @property
    def standardize(self) -> Literal["none", "fleet"]: ...
    @property
    def columns(self) -> tuple[TableColumn, ...]: ...


#: Modality -> its encoder.
Encoders = Mapping[str, Encoder]


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a value's shape is the wanted one; an axis of 0 is open, () takes any shape."""
    return not wanted or (
        len(shape) == len(wanted) and all(w in {0, size} for size, w in zip(shape, wanted, strict=True))
    )


def shown(shape: tuple[int, ...]) -> str:
    """A wanted shape as text, open axes as "any"."""
    return f"[{', '.join(str(size) if size else 'any' for size in shape)}]"

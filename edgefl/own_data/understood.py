"""The samples that were found in a user's files, and what these were taken for, in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Sample:
    """One line of a manifest. ``values``: modality -> path below the data set's folder, text, or list of numbers."""

    id: str
    values: dict[str, object] = field(default_factory=dict)
    label: str = ""
    group: str = ""

    def line(self) -> dict[str, object]:
        """The fields of its line in the manifest."""
        own = {"id": self.id, "label": self.label or None, "group": self.group or None}
        return {key: value for key, value in own.items() if value is not None} | self.values


@dataclass
class Understood:
    """The samples found below ``root``, where the manifest belongs. ``kinds``: modality -> kind of encoder.

    ``said``: what it was taken for, as sentences; ``unused``: files that are no part of it, with the reason.
    """

    root: Path
    samples: list[Sample] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    layout: str = ""

    @property
    def labels(self) -> Counter[str]:
        """Samples of each label."""
        return Counter(sample.label for sample in self.samples if sample.label)

    @property
    def groups(self) -> Counter[str]:
        """Samples of each group."""
        return Counter(sample.group for sample in self.samples if sample.group)

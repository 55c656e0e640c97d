"""The samples that were found in a user's files, and what these were taken for, in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from edgefl.data.label_sets import SEPARATOR
from edgefl.data.recording import is_number
from edgefl.own_data.several_labels import parts
from edgefl.records import TableColumn


@dataclass
class Sample:
    """One line of a manifest. ``values``: modality -> path below the data set's folder, text, or list of numbers."""

    id: str
    values: dict[str, object] = field(default_factory=dict)
    label: str = ""
    group: str = ""

    def line(self, *, numeric: bool = False, several: bool = False) -> dict[str, object]:
        """The fields of its line in the manifest. ``numeric``: its label is a quantity; ``several``: it has several."""
        label: object = float(self.label) if numeric and is_number(self.label) else self.label or None
        if several and label:
            label = parts(self.label, SEPARATOR)
        own = {"id": self.id, "label": label, "group": self.group or None}
        return {key: value for key, value in own.items() if value is not None} | self.values


@dataclass
class Understood:
    """Samples found in a user's files, and how these were read.

    ``root``: folder of the files and of their manifest; ``kinds``: modality -> kind of encoder; ``said``: sentences on
    what the files were taken for; ``unused``: file -> why it is no part of the data; ``columns``: modality -> the table
    columns it is read from; ``label_column``: the column of labels; ``numeric``: labels are quantities; ``several``: a
    sample may have several labels.
    """

    root: Path
    samples: list[Sample] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    layout: str = ""
    columns: dict[str, tuple[TableColumn, ...]] = field(default_factory=dict)
    label_column: str = ""
    numeric: bool = False
    several: bool = False

    @property
    def labels(self) -> Counter[str]:
        """Samples of each label."""
        if self.several:
            return Counter(name for sample in self.samples for name in parts(sample.label, SEPARATOR))
        return Counter(sample.label for sample in self.samples if sample.label)

    @property
    def groups(self) -> Counter[str]:
        """Samples of each group."""
        return Counter(sample.group for sample in self.samples if sample.group)

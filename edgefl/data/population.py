"""The samples of a fleet kept once, and each device's share of them as rows that are taken when it is asked.

``all.npz`` holds the samples, ``rows`` (an .npz too) the devices' rows in the order of their names in the run file, and
of each the number of its kind: devices of one kind say the same of how many samples they have. Where devices draw
(``partition: drawn``) there are no rows: a device's follow from its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgefl.config.settings import DataConfig, MissingConfig
from edgefl.data.arrays import Indices, read_npz, write_npz
from edgefl.data.dataset import Dataset
from edgefl.data.partition import Samples, drawing, drop, partition
from edgefl.label_spaces import spaces_in
from edgefl.storage.disk import store_errors, sync_directory, sync_files

#: In the folder of a run's shares, in place of a file for each device.
ALL, ROWS = "all.npz", "rows"


class Kept(NamedTuple):
    """Rows of all devices, concatenated; ``sizes`` [N]: how many each device has. Both empty where devices draw."""

    rows: Indices
    sizes: Indices
    kinds: Indices | None = None


class Population:
    """The shares of ``devices``, by rows of ``data``. The same for the same seed as those of any other fleet.

    ``kept``: what an earlier process saved. Raises DataError as ``partition`` does.
    """

    def __init__(
        self, data: Dataset, devices: Sequence[str], config: DataConfig, seed: int, kept: Kept | None = None
    ) -> None:
        self.data = data
        self.devices = devices
        self._missing, self._seed = config.missing, seed
        samples = Samples(data.labels, data.recordings if data.groups is None else data.groups, len(data))
        self._draw = drawing(samples, config.partition, seed)
        if kept is None and self._draw is None:
            parts = partition(samples, devices, config.partition, seed)
            kept = Kept(np.concatenate(parts), np.array([len(part) for part in parts]))
        self._rows, sizes, self._kinds = kept or Kept(np.empty(0, np.int64), np.empty(0, np.int64))
        self._ends = np.cumsum(sizes)
        self._place: dict[str, int] = {}
        nothing = {m: np.empty((len(data), 0), values.dtype) for m, values in data.modalities.items()}
        self._without_values = replace(data, modalities=nothing)

    @staticmethod
    def load(
        folder: Path, devices: Sequence[str], config: DataConfig, seed: int, *, mapped: bool = False
    ) -> Population:
        """Read the files that ``save`` wrote; ``mapped``: values are pages that processes share. Raises DataError."""
        arrays = read_npz(folder / ROWS)
        kept = Kept(arrays["rows"], arrays["sizes"], arrays["kinds"])
        return Population(Dataset.load_npz(folder / ALL, mapped=mapped), devices, config, seed, kept)

    def save(self, folder: Path) -> None:
        """Write the samples and rows; not yet durable.

        Raises DataError where a device has no sample left, StoreError.
        """
        kinds, sizes = self.kinds(), np.diff(self._ends, prepend=0)
        self.data.save_npz(folder / ALL, durable=False)
        write_npz(folder / ROWS, {"rows": self._rows, "sizes": sizes, "kinds": kinds}, durable=False)

    @staticmethod
    def sync(folder: Path) -> None:
        """Sync the saved files to disk. Raises StoreError."""
        sync_files([folder / ALL, folder / ROWS])
        with store_errors("sync", folder):
            sync_directory(folder)

    def rows(self, device: str) -> Indices:
        """The device's rows of the samples, in order."""
        if self._draw is not None:
            return self._draw(device)
        if not self._place:
            self._place = {name: place for place, name in enumerate(self.devices)}
        place = self._place[device]
        return self._rows[self._ends[place - 1] if place else 0 : self._ends[place]]

    def share(self, device: str) -> Dataset:
        """The device's samples, less the modalities taken away. Raises DataError when none is left."""
        return self._of(self.data, device)

    def counted(self, device: str) -> Dataset:
        """The device's share without values: what is counted is the same. Raises DataError when no sample is left."""
        return self._of(self._without_values, device)

    def shares(self, some: Callable[[Dataset], Indices]) -> list[Dataset]:
        """Samples of all devices, by their names, in as few data sets as possible.

        ``some``: places of the wanted samples, among all of them in one data set without values. Not asked where
        modalities were taken away: then all samples are given.
        """
        if not _is_plain(self._missing):
            return [self.share(device) for device in sorted(self.devices)]
        rows = np.arange(len(self.data))
        if self._draw is None:
            rows = np.concatenate([self.rows(device) for device in sorted(self.devices)])
        return [self.data.subset(rows[some(self._without_values.subset(rows))])]

    def kinds(self) -> Indices:
        """[N] the kind of each device: those of one have as many samples of each modality, and as many labelled."""
        if self._kinds is None:
            self._kinds = _numbered(self._facts())
        return self._kinds

    def _facts(self) -> Iterable[object]:
        """Counts of samples, and of labelled samples, of each device."""
        labels, flags = self.data.labels, self.data.present.values()
        whole = _is_plain(self._missing) and all(map(np.all, flags)) and not spaces_in(self.data.label_names)
        labelled = np.zeros(len(self.data), np.int64) if labels is None else np.asarray(labels >= 0, np.int64)
        if whole and self._draw is None:
            starts = np.concatenate([[0], self._ends[:-1]])
            sums = np.add.reduceat(labelled[self._rows], starts)
            return zip((self._ends - starts).tolist(), sums.tolist(), strict=True)
        if whole and labelled.all():  # each draws as many
            return [()] * len(self.devices)
        return (_counts(self.counted(device)) for device in self.devices)

    def _of(self, data: Dataset, device: str) -> Dataset:
        return drop(data.subset(self.rows(device)), self._missing, self._seed, device)


def _counts(share: Dataset) -> tuple[object, ...]:
    return tuple(sorted(share.samples().items())), sum(share.class_counts())


def _numbered(facts: Iterable[object]) -> Indices:
    known: dict[object, int] = {}
    return np.array([known.setdefault(one, len(known)) for one in facts], dtype=np.int64)


def _is_plain(missing: MissingConfig) -> bool:
    """True if nothing is taken away from any device."""
    return not (missing.rate or missing.devices or missing.unlabelled)

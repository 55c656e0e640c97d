"""Copies among a user's samples, within them or in the test set: the same tells nothing about new ones."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path

import msgspec

from edgefl.own_data.understood import Sample, Understood

#: Kinds whose equal files are copies; equal rows of a table can be different samples.
_KINDS = frozenset({"vision", "audio"})


def leave_copies_out(found: Understood) -> None:
    """Leave out samples whose files are those of an earlier one, and say how many.

    A copy in the test set of what is trained on would count as an answer about something new.
    """
    paths = [path for sample in found.samples if (path := _files(found, sample))]
    sizes = Counter(_size(found.root, each) for each in paths)
    kept: list[Sample] = []
    first: dict[tuple[bytes, ...], Sample] = {}
    others = 0
    for sample in found.samples:
        files = _files(found, sample)
        if not files or sizes[_size(found.root, files)] < 2:
            kept.append(sample)
            continue
        same = first.setdefault(tuple(_digest(found.root / path) for path in files), sample)
        if same is sample:
            kept.append(sample)
        else:
            others += sample.label != same.label
    if copies := len(found.samples) - len(kept):
        labels = f", {others} of them with another label" if others else ""
        found.said.append(
            f"{copies} of {len(found.samples)} samples are copies of others, to the byte: left out{labels}"
        )
        found.samples = kept


def say_shared(found: Understood, test: Understood) -> None:
    """Say how many samples of a test set that is given are among those to train on, label and all."""
    known = {_content(found, sample) for sample in found.samples}
    if shared := sum(_content(test, sample) in known for sample in test.samples):
        found.said.append(
            f"{shared} of the {len(test.samples)} samples of the test set are trained on, too, with the same label: "
            "only the others are new"
        )


def _content(found: Understood, sample: Sample) -> bytes:
    """Label and values, of files by their hash."""
    values: list[object] = [sample.label]
    for m, value in sorted(sample.values.items()):
        there = isinstance(value, str) and os.path.isfile(found.root / value)  # noqa: PTH113 - a text may be no path
        values += [m, _digest(found.root / str(value)).hex() if there else value]
    return msgspec.json.encode(values, order="sorted")


def _files(found: Understood, sample: Sample) -> list[str]:
    """A sample's files in order; []: it has other values too, or a file that is empty or not there."""
    values = [str(sample.values[m]) for m in sorted(sample.values) if found.kinds[m] in _KINDS]
    whole = len(values) == len(sample.values) and all(_there(found.root / value) for value in values)
    return values if whole else []


def _there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _size(root: Path, files: list[str]) -> tuple[int, ...]:
    return tuple((root / path).stat().st_size for path in files)


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()  # of at most MAX_FILE_BYTES

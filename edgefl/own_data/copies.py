"""Copies among a user's pictures and sounds: the same file under two names tells nothing about new ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

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

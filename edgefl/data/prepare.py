"""Prepares a fleet's data: load, share out, take modalities away; one .npz a device and test.npz."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.data.arrays import generator
from edgefl.data.dataset import Dataset, Encoder
from edgefl.data.load import Source, load, load_pair
from edgefl.data.partition import partition as share_out
from edgefl.data.withhold import drop
from edgefl.errors import DataError

TEST = "test"
#: Default share of the samples that are held out for tests, where none are given or marked.
TEST_SHARE = 0.2


class Share(msgspec.Struct, frozen=True):
    """One device's share, as written. ``samples``: modality -> samples that have it, "" -> all."""

    device: str = ""
    path: str = ""
    samples: dict[str, int] = {}
    class_counts: tuple[int, ...] = ()
    discarded: int = 0  # samples that lost every modality


class Prepared(msgspec.Struct, frozen=True):
    """What ``prepare_shares`` wrote."""

    shares: tuple[Share, ...] = ()
    test: str = ""  # path of test.npz
    test_samples: int = 0
    test_origin: str = ""  # given, official, groups (held out), samples (held out)
    signature: dict[str, tuple[int, ...]] = {}  # modality -> shape of one sample
    label_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # bad samples left out, as text


def prepare_shares(
    source: Source,
    devices: Sequence[str],
    directory: Path | str,
    *,
    partition: Mapping[str, Mapping[str, Any] | None],
    missing: Mapping[str, Any] | None = None,
    seed: int = 0,
    test: Source | None = None,
    test_share: float = TEST_SHARE,
    bad_samples: str = "error",
    modalities: Mapping[str, Encoder] | None = None,
) -> Prepared:
    """Write ``directory``/<device>.npz for each device and ``directory``/test.npz.

    The same seed gives the same files, byte for byte, whatever method trains on them. Test set: ``test`` when given,
    else the official one of a named source, else ``test_share`` of the samples (see ``hold_out``). Nothing is taken
    away from the test set. Raises DataError (an empty share names its device), StoreError when the disk refuses.
    """
    _check_devices(devices)
    data, official = load_pair(source, bad_samples=bad_samples, modalities=modalities)
    if test:
        origin = "given"
        tested = load(test, bad_samples=bad_samples, modalities=modalities, label_names=data.label_names)
    elif official is not None:
        origin, tested = "official", official
    else:
        data, tested, origin = hold_out(data, test_share, seed, groups_kept=groups_kept(partition, len(devices)))
    _check_shapes(data, tested)
    parts = share_out(data.labels, data.groups, len(devices), partition, seed, count=len(data), names=devices)
    own = {d: drop(data.subset(rows), missing, seed, device=d) for d, rows in zip(devices, parts, strict=True)}
    return Prepared(  # only now is anything written: an error leaves no half of a fleet behind
        shares=tuple(_write(own[d], d, Path(directory), len(rows)) for d, rows in zip(devices, parts, strict=True)),
        test=_write(tested, TEST, Path(directory), len(tested)).path,
        test_samples=len(tested),
        test_origin=origin,
        signature=data.signature(),
        label_names=data.label_names,
        skipped=tuple(dict.fromkeys(str(problem) for problem in data.skipped + tested.skipped)),
    )


def _check_shapes(data: Dataset, tested: Dataset) -> None:
    """The test set tells the coordinator the shapes every device has to have."""
    known = tested.signature()
    for modality, shape in data.signature().items():
        if known.get(modality, shape) != shape:
            raise DataError(
                f"samples of {modality!r} have shape {list(shape)}, those of the test set {list(known[modality])}",
                remedy="Prepare the test set (data.test) as the data is prepared, or leave data.test out.",
            )
    if not set(known) & set(data.signature()):
        raise DataError(
            f"the data has {', '.join(data.signature())}, and the test set {', '.join(known)}",
            remedy="Name the modalities alike in data.source and data.test.",
        )


def _write(own: Dataset, name: str, directory: Path, before: int) -> Share:
    path = directory / f"{name}.npz"
    own.save_npz(path)
    return Share(name, str(path), own.samples(), own.class_counts(), before - len(own))


def groups_kept(partition: Collection[str], devices: int) -> int:
    """Groups that stay for training when whole groups are held out: one a device where they are shared out so."""
    return devices if "natural" in partition else 1


def hold_out(data: Dataset, share: float, seed: int, *, groups_kept: int = 1) -> tuple[Dataset, Dataset, str]:
    """(training set, test set, "groups" or "samples") with about ``share`` of the samples in the test set.

    Whole groups where at least ``groups_kept`` of them stay for training, so that the test is on people, recordings, …
    left out of training; else the same share of each label (and group).
    """
    if not 0 < share < 1:
        raise DataError(f"test_share is {share}", remedy="Give a share between 0 and 1, such as 0.2.")
    rng = generator(seed, "hold out")
    test, origin = np.zeros(len(data), dtype=bool), "samples"
    found, groups = np.unique(data.groups if data.groups is not None else [""] * len(data), return_inverse=True)
    held = min(max(1, round(share * len(found))), len(found) - groups_kept)
    if data.groups is not None and held > 0:
        test, origin = np.isin(groups, rng.permutation(len(found))[:held]), "groups"
    else:
        labels = np.zeros(len(data), dtype=np.int64) if data.labels is None else data.labels
        order = np.lexsort((rng.random(len(data)), labels, groups))  # then every (1 / share)-th: even in each stratum
        place = np.arange(len(data))
        test[order[np.floor((place + 1) * share) > np.floor(place * share)]] = True
    if not test.any() or test.all():
        raise DataError(
            f"{len(data)} samples are too few to hold {share:.0%} out for the test",
            remedy="Name a test set in data.test, or add samples.",
        )
    return data.subset(~test), data.subset(test), origin


def _check_devices(devices: Sequence[str]) -> None:
    if not devices:
        raise DataError("there is no device to share data out to", remedy="Name devices in the run file's fleet.")
    twice = sorted({name for name in devices if list(devices).count(name) > 1})
    if twice:
        raise DataError(f"device named twice: {', '.join(twice)}", remedy="Give each device a name of its own.")
    for name in devices:
        if name == TEST or not name or name.startswith(".") or "/" in name or "\0" in name:
            raise DataError(f"{name!r} can not name a device's file", remedy="Use letters, digits, '.', '_' and '-'.")

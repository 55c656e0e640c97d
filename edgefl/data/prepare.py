"""Prepares a fleet's data: load, share out, take modalities away; one .npz a device, or one of all, and test.npz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgefl.config.settings import DataConfig
from edgefl.data.dataset import Dataset
from edgefl.data.encoders import Encoders
from edgefl.data.hold_out import hold_out, split_warnings
from edgefl.data.levels import level_names
from edgefl.data.population import Population
from edgefl.data.sources import as_test, load, load_pair
from edgefl.errors import DataError
from edgefl.storage.disk import TEST

_NAMED = 5  # silent sounds in a warning


class Share(msgspec.Struct, frozen=True):
    """One device's share, as written. ``samples``: modality -> samples that have it, "" -> all."""

    device: str = ""
    path: str = ""
    samples: dict[str, int] = {}
    class_counts: tuple[int, ...] = ()
    discarded: int = 0  # samples that lost every modality


class Prepared(msgspec.Struct, frozen=True):
    """Files that were written, and what is said of them."""

    shares: tuple[Share, ...] = ()
    test: str = ""  # path of test.npz
    test_samples: int = 0
    test_origin: str = ""  # given, official, groups (held out), samples (held out)
    signature: dict[str, tuple[int, ...]] = {}  # modality -> shape of one sample
    label_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # bad samples, and windows with gaps, as text
    warnings: tuple[str, ...] = ()


def prepare_shares(
    config: DataConfig, devices: Sequence[str], directory: Path, seed: int, modalities: Encoders | None = None
) -> Prepared:
    """Share the source of ``config`` out: ``directory``/<device>.npz for each device, and ``directory``/test.npz.

    The same seed gives the same files, byte for byte, whatever method trains on them. Test set: ``config.test`` when
    given, else the official one of a named source, else held out (see ``hold_out``). Nothing is taken away from the
    test set. Raises DataError (an empty share names its device), StoreError when the disk refuses.
    """
    population, tested, prepared = _shared_out(config, devices, seed, modalities)
    for name in devices:  # an error leaves no half of a fleet behind
        population.counted(name)
    shares = []
    for name in devices:
        path, share = directory / f"{name}.npz", population.share(name)
        share.save_npz(path)
        discarded = len(population.rows(name)) - len(share)
        shares.append(Share(name, str(path), share.samples(), share.class_counts(), discarded))
    tested.save_npz(directory / f"{TEST}.npz")
    return msgspec.structs.replace(prepared, shares=tuple(shares), test=str(directory / f"{TEST}.npz"))


def prepare_population(
    config: DataConfig, devices: Sequence[str], directory: Path, seed: int, modalities: Encoders | None = None
) -> tuple[Prepared, Population]:
    """The same shares, without counts, and the population, which is not saved yet; ``directory``/test.npz is.

    Raises as ``prepare_shares`` does.
    """
    population, tested, prepared = _shared_out(config, devices, seed, modalities)
    population.kinds()  # raises DataError for an empty share
    tested.save_npz(directory / f"{TEST}.npz")
    return msgspec.structs.replace(prepared, test=str(directory / f"{TEST}.npz")), population


def _shared_out(
    config: DataConfig, devices: Sequence[str], seed: int, modalities: Encoders | None
) -> tuple[Population, Dataset, Prepared]:
    """The devices' shares, the test set, and what is said of both. Raises DataError."""
    _check_devices(devices)
    data, official = load_pair(config.source or {}, bad_samples=config.bad_samples, modalities=modalities)
    if config.test:
        names, origin = data.label_names, "given"
        tested = load(as_test(config.test), bad_samples=config.bad_samples, modalities=modalities, label_names=names)
    elif official is not None:
        origin, tested = "official", official
    else:
        data, tested, origin = hold_out(data, config, len(devices), seed)
    if data.targets is not None:  # levels of what is trained on alone
        names = level_names(data.targets)
        if len(names) < 2:
            raise DataError(
                f"the numeric labels that are trained on are all {np.nanmedian(data.targets):g}",
                remedy="Name another label, or add samples with other values.",
            )
        data, tested = data.relabelled(names), tested.relabelled(names)
    _check_shapes(data, tested)
    population = Population(data, devices, config, seed)
    silent = _silent([data, tested], modalities or {})
    prepared = Prepared(
        test_samples=len(tested),
        test_origin=origin,
        signature=data.signature(),
        label_names=data.label_names,
        warnings=(*split_warnings(data, tested, origin), *silent),
        skipped=tuple(dict.fromkeys(str(problem) for problem in data.skipped + tested.skipped)),
    )
    return population, tested, prepared


def _silent(parts: Sequence[Dataset], encoders: Encoders) -> list[str]:
    """Warnings of sounds in which there is nothing to be heard."""
    found, way = [], "leave them out, or store one of two channels that cancel each other out"
    for m in (m for m, encoder in encoders.items() if encoder.kind == "audio"):
        having = [part for part in parts if m in part.modalities]
        heard = [np.asarray(part.modalities[m]).reshape(len(part), -1).any(axis=1) for part in having]
        silent = [
            part.ids[i] for part, some in zip(having, heard, strict=True) for i in np.flatnonzero(part.has(m) & ~some)
        ]
        if silent:
            count = sum(int(part.has(m).sum()) for part in having)
            named = ", ".join(silent[:_NAMED]) + (", …" if len(silent) > _NAMED else "")
            found.append(
                f"{len(silent)} of {count} samples of {m} are silent once their channels are mixed ({named}): {way}"
            )
    return found


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


def _check_devices(devices: Sequence[str]) -> None:
    if not devices:
        raise DataError("there is no device to share data out to", remedy="Name devices in the run file's fleet.")
    twice = sorted(name for name, count in Counter(devices).items() if count > 1)
    if twice:
        raise DataError(f"device named twice: {', '.join(twice)}", remedy="Give each device a name of its own.")
    for name in devices:
        if name == TEST or not name or name.startswith(".") or "/" in name or "\0" in name:
            raise DataError(f"{name!r} cannot name a device's file", remedy="Use letters, digits, '.', '_' and '-'.")

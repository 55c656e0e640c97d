"""Data sets by name: each function returns (training set, test set, groups of the training set, reserved share).

``basic_motions`` lies inside the installed package sktime; the others are folders below EDGEFL_DATA.

Scaling ("fixed"): each sensor is divided by a constant, the spread in the *published* training split, rounded; those of
har_hapt are centred by constants too. They are the same on every device, keep the direction of gravity, and tell
nothing of any device's own data.
"window": each channel of each window to mean 0 and deviation 1 (loses gravity and strength). "none": as recorded.

``reserve``: a share of the training part that neither trains nor tests, for pretraining (``part: reserved``); drawn by
whole people, recordings or families of concepts, in an order of its own, so that a larger share holds a smaller one.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from edgefl.data.arrays import Array, Indices, read_npz
from edgefl.data.dataset import Dataset
from edgefl.data.reserve import RESERVED, draw, repaired
from edgefl.data.tokens import DEFAULT_VOCABULARY, tokenizer
from edgefl.data.ts_files import read_ts
from edgefl.errors import DataError, MissingDependencyError
from edgefl.storage.checkpoint_paths import is_own

#: Root mean square deviation over all series and axes of the training split, rounded. Units are not published.
BASIC_MOTIONS_SCALE = {"acc": 6.0, "gyro": 2.5}
#: The same for har_hapt, in g and rad/s; and the mean of each axis (gravity on a phone worn at the waist) to take off.
HAR_SCALE = {"acc": 0.4, "body_acc": 0.15, "gyro": 0.35}
HAR_CENTRE = {"acc": (0.8, 0.03, 0.1), "body_acc": (0.0, 0.0, 0.0), "gyro": (0.0, 0.0, 0.0)}
HAR_WINDOW = 128  # samples at 50 Hz
#: Group of the entry points by which other packages bring data sets: name -> a function that returns ``Named``.
GROUP = "edgefl.datasets"
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
#: Class names of av_digits by its option label.
DIGIT_LABELS = {
    "digit": tuple("0123456789"),
    "sum": tuple(map(str, range(19))),
    "bits": ("low-low", "low-high", "high-low", "high-high"),
}
VENDORS = ("openmoji", "twemoji", "noto", "fxemoji")


class Named(NamedTuple):
    """``groups`` [N]: who or what each training sample came from; the same as ``train.groups``.

    ``reserved``: what the option ``reserve`` keeps from both, for pretraining; None: nothing.
    """

    train: Dataset
    test: Dataset
    groups: Array | None
    reserved: Dataset | None = None


def named(name: str, options: Mapping[str, object] | None = None) -> Named:
    """The data set ``name`` with its options. Raises DataError naming the valid names or options."""
    if name not in names():
        raise DataError(f"unknown data set {name!r}", remedy=f"Valid names: {', '.join(names())}; or give a path.")
    make: Callable[..., Named]
    if name in NAMED:
        make = NAMED[name]
    else:
        point = next(iter(entry_points(group=GROUP, name=name)))
        try:
            make = point.load()
        except Exception as error:  # of another package
            package = point.dist.name if point.dist else point.value
            raise DataError(
                f"data set {name!r} of package {package} does not load: {type(error).__name__}: {error}",
                remedy="Repair or remove the package.",
            ) from error
    given, valid = dict(options or {}), list(inspect.signature(make).parameters)
    if unknown := sorted(set(given) - set(valid)):
        raise DataError(f"{name} has no option {', '.join(unknown)}", remedy=f"Valid options: {', '.join(valid)}.")
    try:
        return make(**given)
    except KeyError as error:
        raise DataError(f"{name}: its file holds no array {error}", remedy="Fetch the data set anew.") from None


#: Sources of the named data sets, and the arrays that are read.
ORIGINS = {
    "har_hapt": "UCI Machine Learning Repository no. 341 (Reyes-Ortiz et al., HAPT v2.1), in windows of 128 with step "
    "64 in har_hapt.npz: acc, body_acc, gyro [N, 128, 3], label, subject, split, experiment, start [N], label_names",
    "av_digits": "MNIST and the Free Spoken Digit Dataset in av_digits.npz: image [N, 28, 28], audio_index, label, "
    "split, speaker, mnist_index [N], fsdd_logmel [S, 40, 61], speaker_names",
    "emoji_pairs": "OpenMoji, Noto, Twemoji and FxEmoji in emoji64_<vendor>.npz: image [N, 64, 64, 3], concept, label, "
    "split [N], label_names; and concepts.jsonl, a concept a line",
}


@cache
def _installed() -> tuple[str, ...]:
    """Data sets of installed packages, of which all are looked through: once, not for each device of a fleet."""
    return tuple(point.name for point in entry_points(group=GROUP))


def names() -> list[str]:
    """Names of the data sets there are: our own, and the entry points ``edgefl.datasets`` of installed packages."""
    return [*NAMED, *(name for name in _installed() if name not in NAMED)]


def data_home() -> Path:
    """The folder that `edgefl data fetch` fills: EDGEFL_DATA, else edgefl/data below the user's own data."""
    if given := os.environ.get("EDGEFL_DATA"):
        return Path(given)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "edgefl" / "data"


def data_folder(name: str) -> Path:
    """The folder of one data set: in ``data_home``; without EDGEFL_DATA also in ../shared/data from here."""
    bases = [] if os.environ.get("EDGEFL_DATA") else [Path.cwd(), Path(__file__).resolve().parents[2]]
    places = [data_home(), *(base.parent / "shared" / "data" for base in bases)]
    for place in places:
        if (place / name).is_dir():
            return place / name
    from edgefl.config.profiles import shipped  # only now: it loads the methods, and predicting needs none

    way = f"`edgefl data fetch {name}` brings it, or set EDGEFL_DATA to the folder that holds {name}/."
    if name not in shipped("datasets"):
        way = f"Set EDGEFL_DATA to the folder that holds {name}/. It does not come with EdgeFL: {ORIGINS[name]}."
    raise DataError(
        f"the data set {name!r} is not here; looked in {' and '.join(dict.fromkeys(str(p) for p in places))}",
        remedy=f"{way} The run `demo` brings its own data.",
    )


def basic_motions(window: int = 50, step: int = 10, standardise: str = "fixed") -> Named:
    """Smart watch at 10 Hz, four activities, 40 + 40 series of 100 steps, cut into windows; acc, gyro [window, 3].

    Windows of the official training series train, those of the test series test. Group: the series, so that
    overlapping windows stay together. Defaults: windows of 5 s, one a second: 240 + 240 samples.
    """
    _whole("basic_motions", window=(window, 2, 100), step=(step, 1, 100))
    found = importlib.util.find_spec("sktime")  # finds a top-level package without executing it
    places = [] if found is None else list(found.submodule_search_locations or [])
    folder = next((f for f in (Path(p, "datasets", "data", "BasicMotions") for p in places) if f.is_dir()), None)
    if folder is None:
        raise MissingDependencyError("sktime", "demo")
    train, test = (_motions(folder, split, window, step, standardise) for split in ("TRAIN", "TEST"))
    return Named(train, test, train.groups)


def _motions(folder: Path, split: str, window: int, step: int, standardise: str) -> Dataset:
    series, labels, names = read_ts(folder / f"BasicMotions_{split}.ts")  # [S, T, 6]
    if series.shape[1:] != (100, 6):
        raise DataError(f"BasicMotions has series of shape {series.shape[1:]}, not (100, 6)")
    starts = range(0, series.shape[1] - window + 1, step)
    cut = np.stack([series[:, start : start + window] for start in starts], axis=1)  # [S, W, window, 6]
    cut = cut.reshape(-1, window, 6)
    owner = np.repeat(np.arange(len(series)), len(starts))
    values = {"acc": cut[:, :, :3], "gyro": cut[:, :, 3:]}
    return _complete(
        {m: _scale(v, BASIC_MOTIONS_SCALE[m], standardise) for m, v in values.items()},
        labels[owner],
        names,
        ids=[f"{split.lower()}-{s:02d}-{start:02d}" for s in range(len(series)) for start in starts],
        groups=[f"{split.lower()}-{s:02d}" for s in owner],
    )


def har_hapt(
    clients: int = 0,
    test_share: float = 0.3,
    classes: str = "basic",
    signal: str = "total",
    standardise: str = "fixed",
    reserve: float = 0.0,
    mini: bool = False,
) -> Named:
    """Smartphone at 50 Hz, 30 people; acc, gyro [128, 3]. Group: the person.

    ``clients`` 0: the authors' split (21 people train, 9 test). ``clients`` n: the first n people are in both; of each
    recording's windows of each activity the last ``test_share`` in time test (each person was recorded twice, wearing
    the phone differently), and training windows that overlap a test window are left out. ``classes``: basic (6) or all
    (12, with transitions). ``signal``: total or body acceleration. ``reserve``: of the people in the authors' training
    split; ``clients`` counts those that are left. ``mini``: 288 windows of 6 people.
    """
    _choice("har_hapt", classes=(classes, ("basic", "all")), signal=(signal, ("total", "body")))
    _whole("har_hapt", clients=(clients, 0, 30))
    if not isinstance(test_share, float) or not 0 < test_share < 1:
        raise DataError(f"har_hapt: test_share is {test_share!r}", remedy="Give a share between 0 and 1, such as 0.3.")
    raw = read_npz(data_folder("har_hapt") / ("har_mini.npz" if mini else "har_hapt.npz"))
    names = tuple(str(name) for name in raw.pop("label_names"))[: 6 if classes == "basic" else 12]
    keep = raw["label"] < len(names)
    held = draw("har_hapt", reserve, raw["subject"], raw["split"] == 0)
    people = np.unique(raw["subject"][~held])
    if clients > len(people):
        raise DataError(f"har_hapt has {len(people)} people here, not {clients}", remedy="Lower the option clients.")
    if clients:
        keep &= held | np.isin(raw["subject"], people[:clients])
    raw, held = {key: array[keep] for key, array in raw.items()}, held[keep]
    role = np.where(held, RESERVED, _last_in_time(raw, test_share) if clients else raw["split"])
    acc = "body_acc" if signal == "body" else "acc"
    whole = _complete(
        {
            m: _scale(raw[k].astype(np.float32), HAR_SCALE[k], standardise, HAR_CENTRE[k])
            for m, k in (("acc", acc), ("gyro", "gyro"))
        },
        raw["label"].astype(np.int64),
        names,
        ids=[f"{e:02d}-{start:05d}" for e, start in zip(raw["experiment"], raw["start"], strict=True)],
        groups=[f"person-{s:02d}" for s in raw["subject"]],
    )
    return _cut(whole, role)


def _last_in_time(raw: Mapping[str, Array], share: float) -> Indices:
    """[N]: 0 train, 1 test, 2 left out (overlaps a test window, which starts half a window earlier or later)."""
    start, where = raw["start"].astype(np.int64), raw["experiment"].astype(np.int64)
    role = np.zeros(len(start), dtype=np.int64)
    order = np.lexsort((start, where))
    for recording in np.unique(where):
        for label in np.unique(raw["label"]):
            own = order[(where == recording)[order] & (raw["label"] == label)[order]]
            # At least one trains: a recording with a single window of an activity has nothing to spare.
            role[own[len(own) - min(round(len(own) * share), max(len(own) - 1, 0)) :]] = 1
        test, train = (np.flatnonzero((where == recording) & (role == half)) for half in (1, 0))
        role[train[(np.abs(start[train][:, None] - start[test]) < HAR_WINDOW).any(axis=1)]] = 2
    return role


def av_digits(
    label: str = "digit", speakers: Sequence[str] = SPEAKERS, reserve: float = 0.0, mini: bool = False
) -> Named:
    """Handwritten and spoken digits; image [28, 28, 1] in 0..1, audio [61, 40] log-mel in 0..1. Group: the speaker.

    ``label``: digit, an image and a recording of the same digit (10 classes); sum of the two digits (19) and bits,
    whether each is 5 or more (4), of images and recordings paired at random: one of them does not give the class
    away. ``speakers``: these alone. ``reserve``: of each speaker's recordings of each digit, with the images that they
    are paired with. ``mini``: 640 pairs.
    """
    _choice("av_digits", label=(label, tuple(DIGIT_LABELS)))
    _several("av_digits", "speakers", speakers, SPEAKERS)
    raw = read_npz(data_folder("av_digits") / ("av_mini.npz" if mini else "av_digits.npz"))
    sounds, speaker = raw.pop("fsdd_logmel"), raw.pop("speaker_names")[raw["speaker"]]
    taken = np.isin(speaker, speakers)
    strata = raw["label"] + 10 * raw["speaker"].astype(np.int64)
    held = draw("av_digits", reserve, raw["audio_index"], raw["split"] == 0, strata)
    role = np.where(held, RESERVED, raw["split"])[taken]
    image, digit, audio, number = (raw[key][taken] for key in ("image", "label", "audio_index", "mnist_index"))
    labels, speaker = digit.astype(np.int64), speaker[taken]
    if label != "digit":
        order = repaired(role, speaker)
        audio, spoken = audio[order], labels[order]
        labels = labels + spoken if label == "sum" else 2 * (labels >= 5) + (spoken >= 5)
    whole = _complete(
        {
            "image": image[..., None].astype(np.float32) / 255,
            "audio": sounds[audio].transpose(0, 2, 1).astype(np.float32) / 255,
        },
        labels,
        DIGIT_LABELS[label],
        ids=[f"{i}-{a}" for i, a in zip(number, audio, strict=True)],
        groups=[str(s) for s in speaker],
    )
    return _cut(whole, role)


class _Concept(msgspec.Struct):
    concept: int
    text: str
    family: str = ""
    subgroup: str = ""


def emoji_pairs(
    vendors: Sequence[str] = VENDORS,
    length: int = 24,
    vocabulary: int = DEFAULT_VOCABULARY,
    pretrained: str = "",
    label: str = "group",
    reserve: float = 0.0,
    mini: bool = False,
) -> Named:
    """Emoji drawings and descriptions; image [64, 64, 3] in 0..1, text [length] ids. Group: the vendor.

    ``pretrained``: a checkpoint whose tokenizer to use instead of hashed words. ``label``: group (8 classes) or
    subgroup (96). ``reserve``: of the families of training concepts of each group, in all vendors' drawings. ``mini``:
    448 images [32, 32, 3].
    """
    _several("emoji_pairs", "vendors", vendors, VENDORS if mini else (*VENDORS, "openmoji_black"))
    _choice("emoji_pairs", label=(label, ("group", "subgroup")))
    _whole("emoji_pairs", length=(length, 2, 512), vocabulary=(vocabulary, 3, 10**6))
    folder = data_folder("emoji_pairs")
    if mini:
        raw = read_npz(folder / "emoji_mini32.npz")
        raw["vendor"] = raw.pop("vendor_names")[raw["vendor"]]
    else:
        parts = [read_npz(folder / f"emoji64_{vendor}.npz") for vendor in vendors]
        raw = {key: np.concatenate([part[key] for part in parts]) for key in ("image", "concept", "label", "split")}
        raw["vendor"] = np.repeat(np.array(vendors), [len(part["label"]) for part in parts])
        raw["label_names"] = parts[0]["label_names"]
        del parts  # 66 MB of pictures, before they become floats
    names, keep = tuple(str(name) for name in raw.pop("label_names")), np.isin(raw["vendor"], vendors)
    raw = {key: array[keep] for key, array in raw.items()}
    hashes = not pretrained or is_own(pretrained)
    tokenize = tokenizer(vocabulary if hashes else 0, pretrained)
    lines = (folder / "concepts.jsonl").read_bytes().splitlines()
    concepts = {c.concept: c for c in (msgspec.json.decode(line, type=_Concept) for line in lines)}
    drawn = [concepts[int(c)] for c in raw["concept"]]
    held = draw("emoji_pairs", reserve, np.array([c.family for c in drawn]), raw["split"] == 0, raw["label"])
    labels = raw["label"].astype(np.int64)
    if label == "subgroup":
        names = tuple(sorted({c.subgroup for c in concepts.values()}))
        labels = np.array([names.index(c.subgroup) for c in drawn])
    ids = {number: tokenize(c.text, length) for number, c in concepts.items()}
    whole = _complete(
        {"image": raw["image"].astype(np.float32) / 255, "text": np.stack([ids[c.concept] for c in drawn])},
        labels,
        names,
        ids=[f"{v}-{c}" for v, c in zip(raw["vendor"], raw["concept"], strict=True)],
        groups=[str(v) for v in raw["vendor"]],
    )
    return _cut(whole, np.where(held, RESERVED, raw["split"]))


def _complete(
    modalities: dict[str, Array],
    labels: Indices,
    names: tuple[str, ...],
    ids: list[str],
    groups: list[str],
) -> Dataset:
    flags = {m: np.ones(len(ids), dtype=bool) for m in modalities}
    return Dataset(modalities, flags, labels, names, ids, np.array(groups, dtype=np.str_))


def _cut(whole: Dataset, split: Array) -> Named:
    train, test, held = whole.subset(split == 0), whole.subset(split == 1), split == RESERVED
    return Named(train, test, train.groups, whole.subset(held) if held.any() else None)


def _scale(values: Array, scale: float, standardise: str, centre: Sequence[float] = (0.0,)) -> Array:
    """``values`` [N, T, C]; ``centre``: one number, or one a channel."""
    _choice("data set", standardise=(standardise, ("fixed", "window", "none")))
    if standardise == "fixed":
        values = (values - np.asarray(centre, values.dtype)) / scale
    elif standardise == "window":
        deviation = values.std(axis=1, keepdims=True)
        # A sensor at rest has only noise, which must not be blown up to the strength of a movement.
        values = (values - values.mean(axis=1, keepdims=True)) / np.maximum(deviation, 0.05 * scale)
    return np.ascontiguousarray(values, dtype=np.float32)


def _whole(name: str, **given: tuple[object, int, int]) -> None:
    for option, (value, low, high) in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DataError(f"{name}: {option} is {value!r}", remedy=f"Give a whole number from {low} to {high}.")


def _several(name: str, option: str, given: Sequence[str], valid: Sequence[str]) -> None:
    _choice(name, **{f"{option}[{i}]": (value, valid) for i, value in enumerate(given)})
    if not given:
        raise DataError(f"{name}: no {option.rstrip('s')} is named", remedy=f"Valid {option}: {', '.join(valid)}.")


def _choice(name: str, **given: tuple[object, Sequence[str]]) -> None:
    for option, (value, valid) in given.items():
        if value not in valid:
            raise DataError(f"{name}: {option} is {value!r}", remedy=f"Valid: {', '.join(valid)}.")


NAMED: dict[str, Callable[..., Named]] = {
    "basic_motions": basic_motions,
    "har_hapt": har_hapt,
    "av_digits": av_digits,
    "emoji_pairs": emoji_pairs,
}

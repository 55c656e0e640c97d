"""The layout of a folder of samples: which part of a file's path is its label, group, modality or id.

A layout is a template of the path without its suffix, such as ``{group}/{label}/{id}`` or ``{label}_{id}_{modality}``;
``_`` stands for ``_``, ``-`` and a blank, ``{_}`` for a part without meaning. ``guess`` makes one from the paths.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from edgefl.data.suffixes import KIND_OF
from edgefl.errors import DataError

#: Kind -> the modality's name where nothing in the path names it.
NAME_OF = {"vision": "image", "audio": "audio", "text": "text", "sensor": "sensor"}
#: Words in paths that name a modality: sensors by their usual names, and the kinds.
_WORDS = frozenset(
    re.findall(
        r"\w+",
        "acc accel accelerometer gyro gyroscope mag magnetometer press pressure baro barometer temp temperature hum "
        "humidity ecg emg eeg ppg eda hr imu light radar lidar audio sound sounds wav wavs mic voice speech image "
        "images img imgs photo photos picture pictures camera cam rgb depth thermal text texts txt caption captions "
        "description",
    )
)
#: Names of folders that are people, devices and the like: a word and a number.
_GROUPS = re.compile(
    r"(person|people|subject|subj|user|speaker|participant|patient|client|device|vendor|site|session|p|s|u)[-_ ]?\d+",
    re.IGNORECASE,
)
#: More values than this of a part of the names, and it is a number or an id, not a class.
MOST_CLASSES = 50
_SEPARATOR = "[_\\- ]"
_FIELDS = ("label", "group", "modality", "id")


def kind_of(suffix: str) -> str:
    """The kind of encoder for a file of this suffix; other tables than .csv are cut into sensors' files."""
    return KIND_OF.get(suffix.lower(), "sensor")


class Parts(NamedTuple):
    """Parts of a path. ``key``: the same for all files of one sample; texts are "" where not said."""

    key: str
    label: str
    group: str
    modality: str


class Layout:
    """A template of paths, applied to one after the other. Raises DataError for a template that is none."""

    def __init__(self, template: str) -> None:
        self.template = template
        names = re.findall(r"\{(\w*)\}", template)
        unknown = [name for name in names if name not in {*_FIELDS, "_"}]
        twice = [name for name in _FIELDS if names.count(name) > 1]
        if unknown or twice or "id" not in names:
            which = (unknown or twice or ["id"])[0]
            fault = "is unknown" if unknown else "is there twice" if twice else "is missing"
            raise DataError(
                f"the path template {template!r} cannot be used: {{{which}}} {fault}",
                remedy="Write the path without its suffix from {id} (once), {label}, {group}, {modality} and {_}, such "
                "as {group}/{label}/{id}.",
            )
        self._pattern = re.compile(_regex(template))

    def parts(self, path: str) -> Parts | None:
        """The parts of a path without its suffix; None where it does not have this layout."""
        if (match := self._pattern.fullmatch(path)) is None:
            return None
        found = match.groupdict()
        start, end = match.span("modality") if "modality" in found else (0, 0)
        key = (path[:start] + path[end:]).replace("//", "/").strip("/_- ") if end else path
        return Parts(key or path, found.get("label", ""), found.get("group", ""), found.get("modality", "").lower())


def _regex(template: str) -> str:
    text = ""
    for literal, name in re.findall(r"([^{]*)(?:\{(\w*)\})?", template):
        text += re.escape(literal).replace("_", _SEPARATOR)
        if name == "id":
            text += "(?P<id>[^/]+)"
        elif name == "modality":
            text += "(?P<modality>[^/]+?)" if "/" in template else "(?P<modality>[^/_\\- ]+)"
        elif name:
            text += "[^/]+?" if name == "_" else f"(?P<{name}>[^/]+?)"
    return text


def is_group(name: str) -> bool:
    """Whether a folder's name is that of a person, a device or the like: a word and a number."""
    return _GROUPS.fullmatch(name) is not None


def guess(paths: Sequence[str]) -> Layout:
    """The layout of files, given as relative paths with suffixes, all equally deep."""
    files = [PurePosixPath(path) for path in paths]
    depth = len(files[0].parts) - 1
    roles = ["_"] * depth
    open_levels = [level for level in range(depth) if not _is_modality(files, level)]
    for level in set(range(depth)) - set(open_levels):
        roles[level] = "modality"
    name = _name(files, has_modality="modality" in roles)
    label, group = _folders(files, open_levels, named="{label}" in name)
    for place, role in ((label, "label"), (group, "group")):
        if place is not None:
            roles[place] = role
    if label is not None:
        name = name.replace("{label}_", "")
    return Layout("/".join([*(f"{{{role}}}" for role in roles), name]))


def _is_modality(files: Sequence[PurePosixPath], level: int) -> bool:
    """Whether the folders of a level name modalities: by their words, or as each holds files of a kind of its own."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for file in files:
        kinds[file.parts[level].lower()].add(kind_of(file.suffix))
    if len(kinds) < 2:
        return False
    apart = all(len(of) == 1 for of in kinds.values()) and len(set.union(*kinds.values())) == len(kinds)
    return apart or all(word in _WORDS for word in kinds)


def _tokens(file: PurePosixPath) -> list[str]:
    return [token for token in re.split(_SEPARATOR, file.stem) if token]


def _name(files: Sequence[PurePosixPath], *, has_modality: bool) -> str:
    """The template of the file's own name: a modality at its end or start, a class first, a group second."""
    named = [_tokens(file) for file in files]
    front, back = "", ""
    if not has_modality and all(len(tokens) > 1 for tokens in named):
        if _mostly(tokens[-1].lower() in _WORDS for tokens in named):
            back, named = "_{modality}", [tokens[:-1] for tokens in named]
        elif _mostly(tokens[0].lower() in _WORDS for tokens in named):
            front, named = "{modality}_", [tokens[1:] for tokens in named]
    roles: list[str] = []
    for role in ("label", "group"):
        place = len(roles)
        if not all(len(tokens) > place + 1 for tokens in named) or not _is_class([tokens[place] for tokens in named]):
            break
        roles.append(role)
    return front + "".join(f"{{{role}}}_" for role in roles) + "{id}" + back


def _mostly(flags: Iterable[bool]) -> bool:
    found = list(flags)
    return sum(found) > 0.9 * len(found)


def _is_class(values: Sequence[str]) -> bool:
    """Whether few values occur again and again, and they are no running numbers."""
    counts = Counter(values)
    return 2 <= len(counts) <= MOST_CLASSES and len(values) >= 3 * len(counts) and min(counts.values()) >= 2


def _folders(files: Sequence[PurePosixPath], levels: Sequence[int], *, named: bool) -> tuple[int | None, int | None]:
    """The levels that are (label, group); None: there is none. ``named``: file names begin with what may be a class.

    One level is the label unless its folders are people, or the same classes stand in the file names of several.
    """
    if not levels:
        return None, None
    groups = [level for level in levels if _mostly(is_group(file.parts[level]) for file in files)]
    if len(levels) == 1:
        (level,) = levels
        shared = named and _shared(files, level)
        return (None, level) if groups or shared else (level, None)
    group = groups[0] if groups else levels[0]
    rest = [level for level in levels if level != group]
    return rest[-1], group


def _shared(files: Sequence[PurePosixPath], level: int) -> bool:
    """Whether file names of several folders begin alike."""
    folders: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folders[_tokens(file)[0]].add(file.parts[level])
    return _mostly(len(within) > 1 for within in folders.values())

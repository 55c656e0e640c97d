"""Arrays, data frames and Datasets as a run's source, with a drafted run file."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgefl.config.profiles import RunSource
from edgefl.config.yaml_files import Overrides, valid_names
from edgefl.data.arrays import Array, write_npz
from edgefl.data.dataset import Dataset
from edgefl.data.folder import MANIFEST
from edgefl.errors import ConfigError, DataError, Problem
from edgefl.own_data.draft import Paths, Wishes, encoders, recipe_for, run_values
from edgefl.own_data.source import Source, from_arrays, from_files
from edgefl.own_data.wishes import NO_ROLES, Roles
from edgefl.records import MODALITY_RULE, is_modality
from edgefl.storage.disk import store_errors, write_new

if TYPE_CHECKING:
    import pandas as pd

#: Samples: arrays [N, ...] by modality, one array, a data frame of a row each, a Dataset, or an .npz or folder.
GivenData: TypeAlias = "Mapping[str, npt.ArrayLike] | npt.ArrayLike | pd.DataFrame | Dataset | str | Path | None"
#: Labels or groups [N], or the column of a data frame that has them.
Column = str | npt.ArrayLike
NAME = "own"
#: Folder of what programs gave, among the runs.
FOLDER = "data"
#: Axes of a single array -> the modality that it is.
_BY_AXES = {2: "table", 3: "sensor", 4: "image"}
_NUMBERS = "Leave it out, or give numbers [samples, …]; texts are a column of a data frame."
_LOG = logging.getLogger(__name__)


class Given(NamedTuple):
    """A call's data: None where its run file names a source."""

    data: Any = None
    labels: Column | None = None
    groups: Column | None = None


def with_data(file: RunSource | None, given: Given, folder: Path) -> tuple[RunSource, dict[str, object]]:
    """A call's run file, and overrides of its fields for given data.

    The data are written below ``folder``, equal data once. Without a run file one is drafted as `edgefl init` does.
    Raises ConfigError, DataError, StoreError.
    """
    if given.data is None:
        if given.labels is not None or given.groups is not None:
            raise ConfigError("the call", [Problem("labels", "are given without data")], remedy="Give data as well.")
        if file is None:
            raise ConfigError("the call", [Problem("file", "is missing")], remedy="Give a run file, or data.")
        return file, {}
    source, arrays = _source(given, folder)
    listed = "; ".join(f"{name}: {why}" for name, why in source.unused.items())
    if listed and arrays:
        raise DataError(f"data that cannot be used: {listed}", remedy=_NUMBERS)
    if listed:
        _LOG.warning("not used: %s", listed)
    test = "" if source.test is None else str(source.test)
    paths = Paths(NAME, str(source.path), test, arrays=arrays, label=source.label)
    if file is None:
        return run_values(paths, source.facts, source.outline, Wishes()), {}
    drafted = encoders(source.facts, Wishes().size, raw=not arrays)
    fields: dict[str, object] = {"data.source": paths.source}
    fields |= {"data.label": paths.label} if paths.label else {}
    fields |= {f"model.encoders.{m}.columns": one["columns"] for m, one in drafted.items() if "columns" in one}
    return file, fields


def merged(fields: Mapping[str, object], overrides: Overrides) -> Overrides:
    """The fields, and overrides over them, in the form that these have."""
    if isinstance(overrides, Mapping):
        return {**fields, **overrides}
    return [*(f"{path}={json.dumps(value)}" for path, value in fields.items()), *overrides]


def _source(given: Given, folder: Path) -> tuple[Source, bool]:
    """The data as a source of runs, and whether it is an .npz."""
    data, labels, groups = given
    if isinstance(data, str | Path):
        return _of_path(Path(data), given)
    if hasattr(data, "iloc"):  # without an import of pandas
        rows, roles = _rows(data, labels, groups)
        path = _kept(folder, "data.jsonl", rows)
        with _in_the_callers_words(path):
            source = from_files(path, roles=roles, force=True)
        _check_task(source)
        return source, False
    with tempfile.TemporaryDirectory(prefix="edgefl-data-") as name:
        written = Path(name) / "data.npz"
        if isinstance(data, Dataset):
            _none_beside(given, "a Dataset")
            data.save_npz(written)
        else:
            write_npz(written, _arrays(data, labels, groups))
        path = _kept(folder, "data.npz", written.read_bytes())
    with _in_the_callers_words(path):
        source = from_arrays(path)
    _check_task(source)
    return source, True


@contextmanager
def _in_the_callers_words(path: Path) -> Iterator[None]:
    """Errors without the path of what was written for the call, and without options of the command line."""
    try:
        yield
    except DataError as error:
        message = error.message.removeprefix(f"{path}: ")
        raise DataError(message, remedy=error.remedy.replace("by --label", "as labels")) from error


def _of_path(path: Path, given: Given) -> tuple[Source, bool]:
    _none_beside(given, f"{path}, which has its own")
    if path.suffix == ".npz" and path.is_file():
        return from_arrays(path.absolute()), True
    if (path / MANIFEST).is_file():
        return from_files(path.absolute()), True
    raise DataError(
        f"data {str(path)!r} is neither an .npz file nor a folder with manifest.jsonl",
        remedy=f"`edgefl init {path}` writes a manifest and a run file for it; of a table give the data frame.",
    )


def _none_beside(given: Given, what: str) -> None:
    if given.labels is not None or given.groups is not None:
        raise DataError(f"labels or groups are given beside {what}", remedy="Leave them out; they are in the data.")


def _check_task(source: Source) -> None:
    if not recipe_for(source.outline, len(source.facts)):
        raise DataError(
            f"one modality ({next(iter(source.facts))}) and no labels: there is nothing to learn",
            remedy="Give labels: one for each sample.",
        )


def _kept(folder: Path, name: str, content: bytes) -> Path:
    """The file with this content below ``folder``, written where it is not there yet."""
    path = (folder / hashlib.sha256(content).hexdigest()[:12] / name).absolute()
    if not path.is_file():
        with store_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_new(path, content)
    return path


def _arrays(data: object, labels: Column | None, groups: Column | None) -> dict[str, Array]:
    """Arrays as an .npz has them. Raises DataError."""
    if isinstance(data, Mapping):
        named = data
    else:
        alone = _array("data", data)
        named = {_BY_AXES.get(alone.ndim, ""): alone}
    if "" in named:
        raise DataError(
            f"one array of the shape {list(named[''].shape)} is no modality",
            remedy="Features are [N, columns], sensors [N, time, channels], pictures [N, height, width, channels]; or "
            "give a mapping of arrays by modality.",
        )
    found = {str(name): _array(f"data[{name!r}]", values) for name, values in named.items()}
    if not found:
        raise DataError("data has no array", remedy="Give one array [N, …] for each modality.")
    for role, values in (("label", labels), ("group", groups)):
        if isinstance(values, str):
            raise DataError(
                f"{role}s={values!r} names a column, and data is no data frame",
                remedy=f"Give the {role}s as an array, one for each sample.",
            )
        if values is not None and role in found:
            raise DataError(f"{role}s are given, and data[{role!r}] too", remedy="Give them once.")
        if values is not None:
            found[role] = _one_each(f"{role}s", values)
    sizes = {name: len(array) for name, array in found.items() if name != "label_names"}
    if len({*sizes.values()}) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(
            f"the arrays differ in their number of samples: {listed}",
            remedy="Give every array one row a sample, in one order; for samples that lack a modality any row, and "
            "data['MODALITY.present'] that is False there.",
        )
    if wrong := [name for name, array in found.items() if array.ndim > 1 and not is_modality(name)]:
        raise DataError(f"{wrong[0]!r} cannot name a modality", remedy=f"Use {MODALITY_RULE}.")
    return found


def _array(name: str, values: object) -> Array:
    """Numbers or texts. Raises DataError."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"{name} is no array: {error}", remedy="Give samples of one shape.") from error
    if array.dtype.kind == "O":
        cells = [None if _is_absent(value) else value for value in array.ravel().tolist()]
        if odd := next((value for value in cells if not isinstance(value, str | int | float | None)), None):
            raise DataError(
                f"{name} holds {type(odd).__name__} objects, not numbers",
                remedy="Give samples of one shape, as numbers.",
            )
        texts = any(isinstance(value, str) for value in cells)
        flat = ["" if value is None else str(value) for value in cells] if texts else cells
        array = np.array(flat, np.str_ if texts else np.float64 if None in cells else None).reshape(array.shape)
    if array.ndim == 0:
        raise DataError(f"{name} is one value, not an array of samples", remedy="Give one row a sample.")
    return array


def _one_each(name: str, values: npt.ArrayLike) -> Array:
    """Labels or groups [N]: names or numbers. Raises DataError."""
    array = _array(name, values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{name} have the shape {list(array.shape)}: one for each sample is expected",
            remedy="Of one column for each class, give labels.argmax(axis=1).",
        )
    return array.astype(np.str_) if array.dtype.kind == "b" else array


def _rows(frame: pd.DataFrame, labels: Column | None, groups: Column | None) -> tuple[bytes, Roles]:
    """A data frame's rows as .jsonl, and which columns are labels and groups. Raises DataError."""
    names = [str(name) for name in frame.columns]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise DataError(f"the data frame has two columns {twice!r}", remedy="Name each column once.")
    if not len(frame):
        raise DataError("the data frame has no rows", remedy="Give one row a sample.")
    columns = {name: frame.iloc[:, at].astype(object).tolist() for at, name in enumerate(names)}
    chosen = {}
    for role, values in (("label", labels), ("group", groups)):
        if isinstance(values, str):
            if values not in columns:
                hint = valid_names(values, names)
                raise DataError(f"the data frame has no column {values!r}; {hint}", remedy=f"Name one as {role}s.")
            chosen[role] = values
        elif values is not None:
            array = _one_each(f"{role}s", values)
            if len(array) != len(frame):
                raise DataError(
                    f"the data frame has {len(frame)} rows, and {role}s are {len(array)}",
                    remedy=f"Give {role}s for each row, or the name of their column.",
                )
            if role in columns:
                raise DataError(f"{role}s are given, and the column {role!r} too", remedy="Give them once.")
            columns[role] = array.tolist()
            chosen[role] = role
    if "label" not in chosen and "label" not in columns:
        raise DataError(
            "labels are not given: which column is to be learned?", remedy=f"Give labels=COLUMN, of {', '.join(names)}."
        )
    roles = NO_ROLES._replace(label=chosen.get("label", "label"), group=chosen.get("group", ""))
    cells = ([_cell(name, value) for value in values] for name, values in columns.items())
    lines = (json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*cells, strict=True))
    return "".join(f"{line}\n" for line in lines).encode(), roles


def _cell(column: str, value: object) -> str | float | None:
    """A cell as JSON has it; None: absent. Raises DataError."""
    if isinstance(value, Sequence | Mapping | np.ndarray) and not isinstance(value, str):
        raise DataError(
            f"the column {column!r} holds {type(value).__name__} objects",
            remedy="Give numbers, texts, categories or dates; arrays as data={MODALITY: array}.",
        )
    if _is_absent(value):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _is_absent(value: object) -> bool:
    """Whether a cell is missing: None, NaN, or the pandas values NaT and NA."""
    return (
        value is None or type(value).__name__ in {"NAType", "NaTType"} or (isinstance(value, float) and value != value)
    )

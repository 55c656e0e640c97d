"""Runs bundles: numpy in, numpy out, through onnxruntime. No torch.

bundle = load_bundle(Path("bundles/acc+gyro+press"))
bundle.predict({"acc": windows, "gyro": turns}).labels
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import THRESHOLD, classes_in, in_words, plain_names
from edgefl.data.levels import expected_value, levels_in
from edgefl.data.values import as_values, pixel_fault
from edgefl.errors import DataError, ExportError
from edgefl.export.bundle_format import (
    BATCH,
    MANIFEST_FILE,
    ZERO,
    Manifest,
    Port,
    present_name,
    read_manifest,
    read_model,
    table_name,
    valid_name,
)
from edgefl.export.session import Device, Session, open_session, run, runs_on
from edgefl.export.tables import marked, read_tables
from edgefl.models.spec import EncoderSpec
from edgefl.prototypes.table import ClassMeans

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Most samples given to onnxruntime at once: bounds the memory of activations, large enough to keep the cores busy.
ROWS = 64


@dataclass(frozen=True)
class Matched:
    """Prototypes in place of an absent modality: rows [N, k], best first, -1: none; weights [N, k]."""

    rows: Integers
    weights: Floats


@dataclass(frozen=True)
class Prediction:
    """Answers to N samples. Without labels only ``embeddings``: modality -> [N, d], of length one, and
    zero for samples that lack the modality. ``values``: answers [N] of a numeric target, which ``labels`` are as texts.
    Where a sample may have several labels, its text is such as "cat;dog", and its class the likeliest.
    """

    labels: tuple[str, ...] = ()
    classes: Integers = field(default_factory=lambda: np.zeros(0, np.int64))  # [N]
    probabilities: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [N, C]
    logits: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [N, C]
    matched: dict[str, Matched] = field(default_factory=dict)
    embeddings: dict[str, Floats] = field(default_factory=dict)
    values: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Bundle:
    """A verified bundle, ready to answer. Made by :func:`load_bundle`."""

    directory: Path
    manifest: Manifest
    session: Session
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)  # of a call that brings none of its own
    rows: int = ROWS  # samples of a micro-batch, one call of onnxruntime

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of its inputs."""
        return self.manifest.modalities

    def predict(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        present: Mapping[str, npt.ArrayLike] | None = None,
        mask: str | None = None,
        prototypes: Mapping[str, ClassMeans] | None = None,
    ) -> Prediction:
        """Answers for N samples: ``inputs`` holds one array [N, *shape] for each modality of the bundle.

        A bundle that serves any subset (``manifest.subsets``) takes fewer modalities too, and ``present``: which
        samples have one [N], all where nothing is said; what stands in the rows of the others is not looked at.
        ``mask``: one that the manifest offers, such as "prototype" or "zero" (None: its default).
        ``prototypes``: tables used instead of those of the bundle, by modality, of at most ``manifest.capacity`` rows;
        where networks match, that of a modality at hand is not looked at.
        Texts may be shorter than the model's length. Raises DataError for input that does not fit, ExportError for a
        mask the bundle has not.
        """
        has = self._has(inputs, present or {})
        feeds = self._arrays(inputs, has)
        if self.manifest.subsets == "any":
            feeds |= {present_name(m): rows.astype(np.float32) for m, rows in has.items()}
        tables = self._tables(mask, prototypes)
        out = self._in_chunks(feeds, tables, len(next(iter(has.values()))))
        if self.manifest.task == "embed":
            return Prediction(embeddings={m: out[f"embedding.{m}"] for m in self.modalities})
        classes = out["logits"].argmax(axis=1)
        matched = {
            m: Matched(out["matched"][:, i], out["weights"][:, i])
            for i, m in enumerate(self.manifest.fills)
            if "matched" in out and not (m in has and has[m].all())
        }
        levels = levels_in(self.manifest.labels)
        if levels is not None:
            values = expected_value(out["probabilities"], levels)
            labels = tuple(f"{value:.6g}" for value in values)
            return Prediction(labels, classes, out["probabilities"], out["logits"], matched, values=values)
        if (several := classes_in(self.manifest.labels)) is not None:
            labels = tuple(in_words(row >= THRESHOLD, several) for row in out["probabilities"])
        else:
            names = plain_names(self.manifest.labels)
            labels = tuple(names[c] for c in classes)
        return Prediction(labels, classes, out["probabilities"], out["logits"], matched)

    def fitted(self, inputs: Mapping[str, npt.ArrayLike], mask: str | None = None) -> dict[str, np.ndarray]:
        """Inputs of a call converted to the graph's types, with the checks and errors of :meth:`predict`.

        Absent modalities are zeros. Results with equal shapes can be concatenated for one call of ``predict``.
        """
        arrays = self._arrays(inputs, self._has(inputs, {}))
        self._tables(mask, None)
        return arrays

    def _has(self, inputs: Mapping[str, npt.ArrayLike], present: Mapping[str, npt.ArrayLike]) -> dict[str, Flags]:
        """Modality -> presence flags [N] of the samples. Raises DataError."""
        name, takes = self.manifest.name, ", ".join(self.modalities)
        surplus = [m for m in (*inputs, *present) if m not in self.modalities]
        lacking = [m for m in self.modalities if m not in inputs]
        some = self.manifest.subsets == "any"
        if surplus or not inputs or (lacking and not some):
            what = f"does not take {', '.join(surplus)}" if surplus else f"needs {', '.join(lacking)} as well"
            remedy = f"Give {'one or more of' if some else 'exactly'}: {takes}."
            raise DataError(f"the bundle '{name}' {what}; it takes {takes}", remedy=remedy)
        counts = {m: len(np.asarray(array)) for m, array in inputs.items() if np.ndim(array)}
        counts |= {f"{m} (present)": np.size(rows) for m, rows in present.items()}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"the modalities differ in their number of samples: {', '.join(f'{m} {n}' for m, n in counts.items())}",
                remedy="Give the same samples of every modality, in the same order.",
            )
        count = max(counts.values(), default=0)
        every, none = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        has = {m: np.asarray(present.get(m, every), np.bool_) if m in inputs else none for m in self.modalities}
        shown = np.stack(list(has.values()))
        odd = ~shown.any(axis=0) if some else ~shown.all(axis=0)
        if odd.any():
            lacks = "has none of" if some else "has not all of"
            raise DataError(
                f"sample {int(odd.argmax())} {lacks} {takes}, and the bundle '{name}' needs "
                f"{'one' if some else 'them all'}",
                remedy="Leave it out, or use the folder of all bundles.",
            )
        return has

    def _arrays(self, inputs: Mapping[str, npt.ArrayLike], has: Mapping[str, Flags]) -> dict[str, np.ndarray]:
        """Name -> input array of the graph, zeros for absent modalities."""
        arrays, axes = {}, self.manifest.axes
        for port in self.manifest.inputs:
            rows = has[port.name]
            if port.name not in inputs:  # values that are not read: as small as the graph takes them
                least = [axes[size].minimum if isinstance(size, str) else size for size in port.shape[1:]]
                arrays[port.name] = np.zeros((len(rows), *least), port.dtype)
                continue
            given = np.asarray(inputs[port.name])
            if not rows.all():
                given = np.where(rows.reshape(-1, *[1] * (given.ndim - 1)), given, np.zeros((), given.dtype))
            arrays[port.name] = self._array(port, given)
        return arrays

    def _array(self, port: Port, array: np.ndarray) -> np.ndarray:
        """An input checked against its port and converted to its type. Raises DataError."""
        axes = self.manifest.axes
        expected = [f"1 to {axes[s].maximum}" if isinstance(s, str) and s != BATCH else s for s in port.shape]
        fits = array.ndim == len(port.shape) and all(
            size == s if isinstance(s, int) else 1 <= size <= (axes[s].maximum or size)
            for size, s in zip(array.shape, port.shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"'{port.name}' has the shape {list(array.shape)}, the bundle takes [{', '.join(map(str, expected))}]",
                remedy="Give an array of samples along the first axis, windowed or resized as in training.",
            )
        if port.dtype == "int64":
            most, length = self.manifest.encoders[port.name].vocabulary - 1, port.shape[1]
            if array.dtype.kind not in "iu":
                raise DataError(f"'{port.name}' holds {array.dtype}, the bundle takes token ids (integers)")
            if array.min() < 0 or array.max() > most:
                raise DataError(f"'{port.name}': token ids {array.min()} to {array.max()}; valid: 0 to {most}")
            short = axes[length].minimum - array.shape[1] if isinstance(length, str) else 0
            return np.pad(array.astype(np.int64), ((0, 0), (0, max(0, short))))
        if array.dtype.kind not in "fiu":
            raise DataError(f"'{port.name}' holds {array.dtype}, the bundle takes numbers", remedy="Give float32.")
        kind = self.manifest.encoders[port.name].kind
        values = np.ascontiguousarray(as_values(array, kind))
        if not np.isfinite(values).all():
            raise DataError(f"'{port.name}' holds values that are not finite (NaN or infinite)")
        if kind == "vision" and (fault := pixel_fault(values)):
            remedy = "Give bytes (UINT8), or divide by the largest value that a pixel can have."
            raise DataError(f"'{port.name}' holds {fault}, the bundle takes 0 to 1", remedy=remedy)
        return values

    def _in_chunks(
        self, feeds: Mapping[str, np.ndarray], tables: Mapping[str, np.ndarray], count: int
    ) -> dict[str, np.ndarray]:
        """Outputs of ``count`` samples, run in chunks of similar text length, without shared padding."""
        texts = [port for port in self.manifest.inputs if port.dtype == "int64" and isinstance(port.shape[1], str)]
        least = {port.name: self.manifest.axes[str(port.shape[1])].minimum for port in texts}
        lengths = {m: _lengths(feeds[m]) for m in least}
        order = np.argsort(np.sum(list(lengths.values()), axis=0), kind="stable") if lengths else None
        runs = []
        for start in range(0, count, self.rows):
            # Without texts a slice, which copies nothing.
            rows = slice(start, start + self.rows) if order is None else order[start : start + self.rows]
            chunk = {m: array[rows] for m, array in feeds.items()}
            trimmed = {m: chunk[m][:, : max(least[m], int(lengths[m][rows].max()))] for m in least}
            runs.append(run(self.session, {**chunk, **trimmed, **tables}))
        out = {name: np.concatenate([one[name] for one in runs]) for name in runs[0]}
        return out if order is None else {name: array[np.argsort(order)] for name, array in out.items()}

    def _tables(self, mask: str | None, prototypes: Mapping[str, ClassMeans] | None) -> dict[str, np.ndarray]:
        """Input name -> table for a call, by mask and given prototypes. Raises ExportError, DataError."""
        has = {port.name: port.shape for port in self.manifest.tables}
        if mask is not None and mask not in self.manifest.masks:
            offered = " and ".join(self.manifest.masks) or "none: it takes every modality"
            raise ExportError(
                f"the bundle '{self.manifest.name}' does not offer the mask {mask!r}; it offers {offered}",
                remedy="Leave the mask out, or export with a --mask that offers it.",
            )
        asked = mask not in (None, ZERO) and self.manifest.mask == ZERO
        feeds = marked(self.tables) if asked else dict(self.tables)
        dtypes = {port.name: port.dtype for port in self.manifest.tables}
        for m, table in (prototypes or {}).items():
            if self.manifest.networks and m in self.modalities and table_name(m) not in has:
                continue  # networks match it, not its table
            rows, width = has.get(table_name(m), (0, 0))
            if table.means.shape[1] != width or len(table.counts) > int(rows):
                raise DataError(
                    f"prototypes of '{m}' {list(table.means.shape)} do not fit the bundle '{self.manifest.name}', "
                    f"which has room for {[rows, width]}",
                    remedy="Export with a larger --capacity, or without prototypes of other modalities.",
                )
            spare = int(rows) - len(table.counts)
            feeds[table_name(m)] = np.pad(table.means.astype(np.float32), ((0, spare), (0, 0)))
            feeds[valid_name(m)] = np.pad(table.present, (0, spare)).astype(dtypes[valid_name(m)])
        if mask == ZERO:
            capacity = self.manifest.capacity
            feeds |= {name: np.zeros(capacity, dtypes[name]) for name in has if name.endswith(".valid")}
        return feeds


def _lengths(ids: np.ndarray) -> np.ndarray:
    """Length of each text in tokens [N], without trailing padding (0), of ids [N, L]."""
    real = ids != 0
    found: np.ndarray = np.where(real.any(axis=1), ids.shape[1] - real[:, ::-1].argmax(axis=1), 0)
    return found


def load_bundle(path: str | Path, *, device: Device = "cpu", threads: int = 0) -> Bundle:
    """Load the bundle at ``path`` (its folder, manifest or model file), its hash verified.

    ``device`` "cuda" and "tensorrt" need onnxruntime-gpu and are never silently replaced by another; "auto" takes the
    fastest that works, which ``session.runs_on`` tells. Raises ExportError (no bundle,
    damaged, of another version, device unusable), MissingDependencyError.
    """
    path = Path(path)
    directory = path.parent if path.is_file() else path
    manifest = read_manifest(directory)
    session = open_session(read_model(directory, manifest), device, threads)
    return Bundle(directory, manifest, session, read_tables(directory, manifest))


def find_bundles(path: Path) -> dict[Path, Manifest]:
    """Folder -> manifest of the bundle at ``path``, or of all bundles in the folder ``path``. Raises ExportError."""
    if not path.exists():
        raise ExportError(
            f"there is no bundle {path}", remedy="Write bundles with `edgefl export RUN`; they lie in RUN's bundles/."
        )
    directory = path.parent if path.is_file() else path
    if (directory / MANIFEST_FILE).is_file() or path.is_file():
        return {directory: read_manifest(directory)}
    found = {one.parent: read_manifest(one.parent) for one in sorted(directory.glob(f"*/{MANIFEST_FILE}"))}
    if not found:
        sets = sorted({str(one.parent.parent) for one in directory.glob(f"*/*/{MANIFEST_FILE}")})
        if len(sets) == 1:
            return find_bundles(Path(sets[0]))
        if sets:
            raise ExportError(
                f"{directory} holds {len(sets)} folders of bundles",
                remedy=f"Give those of one: {' or '.join(sets)}.",
            )
        raise ExportError(
            f"{directory} holds no bundle", remedy="Give the folder of a bundle, or the folder `edgefl export` wrote."
        )
    if len({(m.task, m.labels) for m in found.values()}) > 1:
        raise ExportError(
            f"the bundles in {directory} are of different models: their labels differ", remedy="Give one bundle."
        )
    if len({m.precision for m in found.values()}) > 1:
        told = ", ".join(f"{m.name} {m.precision}" for m in found.values())
        raise ExportError(
            f"the bundles in {directory} are of different precisions: {told}",
            remedy="Keep each precision in a folder of its own, as `edgefl export` writes them.",
        )
    # In the model's own order, which the complete bundle knows: of two that fit a sample, the first is taken.
    order = max((manifest.modalities for manifest in found.values()), key=len)
    rank = {m: at for at, m in enumerate(order)}
    places = {path: [rank.get(m, len(rank)) for m in manifest.modalities] for path, manifest in found.items()}
    return {path: found[path] for path in sorted(found, key=lambda path: (len(places[path]), places[path]))}


@dataclass(frozen=True)
class Answers:
    """One bundle's predictions for samples with the same ``modalities``, all used.

    ``rows`` of the data set [n], in the order of the prediction's samples. ``mask``: what stood in for the model's
    other modalities; "none": there are no others. ``runs_on``: the provider that computed them, as its session tells.
    """

    bundle: str
    modalities: tuple[str, ...]
    rows: np.ndarray
    prediction: Prediction
    mask: str = "none"
    runs_on: str = ""


def encoders(bundles: Mapping[Path, Manifest]) -> dict[str, EncoderSpec]:
    """Modality -> encoder specification, over all bundles."""
    return {m: encoder for manifest in bundles.values() for m, encoder in manifest.encoders.items()}


def choose(bundles: Mapping[Path, Manifest], has: frozenset[str]) -> Path | None:
    """The bundle for samples with exactly the modalities ``has``; of several the one with fewest inputs.

    So a single modality's bundle where there is one modality, else the one of all. None: there is no such bundle.
    """
    fitting = [path for path, manifest in bundles.items() if manifest.serves(has)]
    return min(fitting, key=lambda path: len(bundles[path].modalities), default=None)


def apply(
    bundles: Mapping[Path, Manifest], data: Dataset, *, mask: str | None = None, device: Device = "cpu"
) -> tuple[list[Answers], np.ndarray]:
    """Predictions of the bundles, and the rows [n] unusable by any. Loads only bundles in use.

    ``mask`` applies where something is filled in. Raises DataError for samples of which the bundles could use a part
    only, and as ``load_bundle`` and ``Bundle.predict``.
    """
    names = tuple(m for m in encoders(bundles) if m in data.modalities)
    has = np.stack([data.present[m] for m in names], axis=1)  # [N, M]
    answers: list[Answers] = []
    left: list[int] = []
    loaded: dict[Path, Bundle] = {}
    for pattern in np.unique(has, axis=0)[::-1]:  # the most complete samples first
        rows = np.flatnonzero((has == pattern).all(axis=1))
        given = tuple(m for m, there in zip(names, pattern.tolist(), strict=True) if there)
        path = choose(bundles, frozenset(given))
        if path is None:
            _refuse_parts(bundles, given, data.ids[rows[0]])
            left += rows.tolist()
            continue
        if path not in loaded:
            loaded[path] = load_bundle(path, device=device)
        bundle = loaded[path]
        fills = set(bundle.manifest.fills) - set(given)
        used = (mask or bundle.manifest.mask) if fills else "none"
        inputs = {m: data.modalities[m][rows] for m in given}
        prediction = bundle.predict(inputs, mask=None if used == "none" else used)
        answers.append(Answers(bundle.manifest.name, given, rows, prediction, used, runs_on(bundle.session)))
    return answers, np.array(sorted(left), np.int64)


def _refuse_parts(bundles: Mapping[Path, Manifest], given: tuple[str, ...], sample: str) -> None:
    """Raise DataError for a sample that a bundle could answer only without some of its modalities."""
    usable = [manifest.modalities for manifest in bundles.values() if set(manifest.modalities) < set(given)]
    if usable:
        most = max(usable, key=len)
        unused = ", ".join(m for m in given if m not in most)
        raise DataError(
            f"sample {sample} has {' + '.join(given)}, and no bundle uses them together: {unused} would be dropped",
            remedy="Export the run again, whose bundle of all modalities then takes any of them, or choose what to use "
            f"with {' '.join(f'--modality {m}' for m in most)}.",
        )

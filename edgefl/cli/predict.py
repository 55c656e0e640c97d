"""``edgefl predict``: an exported bundle on a file. Needs onnxruntime; neither torch nor a ledger."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from edgefl.api.runs import RUNS
from edgefl.cli.options import BundleArgument, RunsOption, bundle_folder, show
from edgefl.cli.scored import Seen, accuracy, averages, errors, given, in_words, known, seen
from edgefl.console import safe_text, write_data
from edgefl.data.arrays import npz_names
from edgefl.data.column_names import column_names
from edgefl.data.dataset import Dataset
from edgefl.data.label_sets import THRESHOLD, classes_in, plain_names
from edgefl.data.levels import levels_in
from edgefl.data.raw_sample import modality_of_file, raw_samples
from edgefl.data.sources import MANIFEST_SUFFIX, load
from edgefl.errors import DataError
from edgefl.export.bundle_format import STAND_INS, Manifest, OwnMask
from edgefl.export.entries import SCHEMA, embeddings, entry, interval, recording_entries
from edgefl.export.recordings import RecordingAnswer, of_recordings, truth_of
from edgefl.export.runtime import Answers, apply, encoders, find_bundles
from edgefl.models.spec import EncoderSpec, is_task
from edgefl.own_data.table_rows import head_of
from edgefl.own_data.trained_folders import is_new_folder, read_folder
from edgefl.own_data.trained_tables import read_trained, takes_tables
from edgefl.records import is_modality
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, table

#: Samples listed on a terminal when --limit says nothing.
SHOWN = 20
_INTERVAL = "80 % interval"
UNTRAINED = (
    "no device sent an update of the classifier in these bundles: labels are not reliable, and no accuracy is shown"
)


def command(
    bundle: BundleArgument,
    file: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="A folder of files or a table like those that trained, an .npz file, a folder with manifest.jsonl, or "
            "one sample: a file a modality, .npy .csv .txt, picture, sound, or MODALITY=FILE where one may be several.",
        ),
    ],
    modality: Annotated[
        list[str] | None,
        typer.Option(help="Use only this modality of the file, or say what a single sample's file is; repeatable."),
    ] = None,
    mask: Annotated[
        OwnMask | None,
        typer.Option(help="What stands in for absent modalities."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "tensorrt"],
        typer.Option(help="Where to compute; auto: TensorRT, CUDA or the CPU, the first that works here."),
    ] = "auto",
    bad_samples: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with unreadable samples.")
    ] = "error",
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"List at most this many samples; default: {SHOWN}, all with json and csv."),
    ] = None,
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv"], typer.Option("--format", help="How to print.")
    ] = "terminal",
) -> None:
    """Classify the samples of a file, and count how many answers are right where it has labels.

    Each sample is answered by all modalities it has. With a folder of bundles, a sample with one modality goes to that
    modality's bundle, any other to the bundle of all modalities. Of a model that takes windows, each window of a
    recording is a sample, and the recording's answer is the mean of their probabilities.

    Examples: edgefl predict latest walk.csv · edgefl predict runs/ID/bundles runs/ID/shares/test.npz ·
    edgefl predict bundles image=cat.png text=cat.txt
    """
    folder = bundle_folder(bundle, runs)
    bundles = find_bundles(folder)
    first = next(iter(bundles.values()))
    data = read_input(file, encoders(bundles), first.labels, modality or [], bad_samples, first.label_column)
    data = trusted(bundles, data)
    answers, left = apply(bundles, data, mask=mask, device=device)
    if not answers:
        raise DataError(
            f"{' '.join(file)}: no bundle takes {_having(data, int(left[0]))} alone; "
            f"there are: {', '.join(manifest.name for manifest in bundles.values())}",
            remedy="Give the folder of all bundles, or a file that has the other modalities as well.",
        )
    for name in npz_names(Path(file[0])) if file[0].lower().endswith(".npz") else []:
        if is_modality(name) and name not in encoders(bundles):
            sys.stderr.write(f"not used: {name}, which no bundle here takes\n")
    for note in data.notes:
        sys.stderr.write(f"note: {safe_text(note)}\n")
    for problem in data.skipped:
        sys.stderr.write(f"left out: {safe_text(str(problem))}\n")
    if len(left):
        sys.stderr.write(f"left out: {len(left)} samples with only {_having(data, int(left[0]))}: no bundle for them\n")
    if format == "csv":
        write_data(_csv(data, answers, first.labels, limit))
        return
    before = seen(folder, data)
    body = _json(data, before, answers, left, bundles, limit) if format == "json" else None
    names, most = first.labels, limit or SHOWN
    show(format, body, _grid(data, before, answers, names, most), *_recordings_grid(data, answers, names, most))


def read_input(
    files: list[str],
    known: Mapping[str, EncoderSpec],
    labels: tuple[str, ...],
    only: list[str],
    bad_samples: str,
    label_column: str = "",
) -> Dataset:
    """The samples in the files, as the encoders ``known`` take them; several are one sample. Raises DataError.

    A table like that which a model was trained on is read by the columns that the model knows, a folder without a
    manifest by its files' names.
    """
    unknown = [m for m in only if m not in known]
    if unknown:
        raise DataError(f"no bundle takes {', '.join(unknown)}", remedy=f"Choose from: {', '.join(known)}.")
    wanted = {m: encoder for m, encoder in known.items() if not only or m in only}
    if len(files) == 1 and takes_tables(Path(files[0]), wanted) and not _is_recording(Path(files[0]), wanted):
        return read_trained(Path(files[0]), wanted, labels, label_column, bad_samples)
    if len(files) == 1 and is_new_folder(Path(files[0])):
        return read_folder(Path(files[0]), wanted, labels, bad_samples)
    if len(files) > 1 or _is_sample(files[0]):
        return raw_samples(_by_modality(files, wanted), wanted)
    return load(Path(files[0]), bad_samples=bad_samples, modalities=wanted, label_names=labels)


def _is_recording(file: Path, wanted: Mapping[str, EncoderSpec]) -> bool:
    """Whether a .csv is one recording as a sensor's reader takes it: it has none of the columns' names."""
    sensors = [encoder for encoder in wanted.values() if encoder.kind == "sensor"]
    if not sensors or file.suffix.lower() != ".csv":
        return False
    columns = [column.name for encoder in wanted.values() for column in encoder.columns]
    return len(column_names(head_of(file).head, columns).lacking) == len(set(columns))


def _is_sample(file: str) -> bool:
    return (
        "=" in file
        if not Path(file).exists()
        else Path(file).is_file() and not file.lower().endswith((".npz", MANIFEST_SUFFIX))
    )


def _by_modality(files: list[str], wanted: Mapping[str, EncoderSpec]) -> dict[str, Path | str]:
    found: dict[str, Path | str] = {}
    for file in files:
        name, equals, rest = file.partition("=")
        named = bool(equals) and not Path(file).exists()
        m, path = (name, Path(rest)) if named else (modality_of_file(Path(file), wanted), Path(file))
        if m in found:
            raise DataError(f"{file} and {found[m]} are both {m}", remedy="Several files are one sample: one each.")
        found[m] = path
    return found


def trusted(bundles: Mapping[Path, Manifest], data: Dataset) -> Dataset:
    """The samples; without their labels, and with a warning, where no device trained the classifier."""
    untrained = {part for manifest in bundles.values() for part in manifest.untrained}
    if not any(part == "fusion" or is_task(part) for part in untrained):
        return data
    sys.stderr.write(f"warning: {UNTRAINED}\n")
    return replace(data, labels=None)


def _having(data: Dataset, row: int) -> str:
    return " + ".join(m for m in data.modalities if data.present[m][row]) or "nothing"


_Place = tuple[int, Answers, int]  # row of the data set, the answers that hold it, its place in them


def _places(answers: list[Answers], limit: int | None) -> list[_Place]:
    """In the data set's order."""
    places = [(int(row), one, at) for one in answers for at, row in enumerate(one.rows)]
    return sorted(places, key=lambda place: place[0])[:limit]


def _likely(probabilities: np.ndarray, names: tuple[str, ...]) -> str:
    """The largest probability, of several labels that of each answered, or of the likeliest; a number's interval."""
    if bounds := interval(probabilities, names):
        return " to ".join(map(units.number, bounds))
    told = probabilities[probabilities >= THRESHOLD] if classes_in(names) else probabilities[:0]
    return ", ".join(units.percent(float(p)) for p in told) or units.percent(float(probabilities.max()))


def _grid(data: Dataset, before: Seen, answers: list[Answers], names: tuple[str, ...], limit: int) -> Grid:
    def vectors(place: _Place) -> str:
        _, answer, at = place
        texts = {m: ", ".join(f"{x:.3f}" for x in e[at][:4]) for m, e in embeddings(answer).items()}
        return "; ".join(f"{m} [{text}, …]" for m, text in texts.items())

    def label(place: _Place) -> Cell:
        row, answer, at = place
        label, truth = answer.prediction.labels[at], truth_of(data, row)
        numeric = answer.prediction.values is not None  # near is right
        return Cell(label, tone="" if truth is None or numeric else "good" if truth == label else "bad")

    def probability(place: _Place) -> str:
        _, answer, at = place
        return _likely(answer.prediction.probabilities[at], names)

    columns: list[Column[_Place]] = [
        Column("sample", lambda place: data.ids[place[0]], key=True, text=True),
        Column("given", lambda place: given(place[1]), text=True),
    ]
    if not len(answers[0].prediction.classes):
        columns.append(Column("embedding", vectors, text=True))
    else:
        numeric, several = answers[0].prediction.values is not None, classes_in(names) is not None
        columns.append(Column("value" if numeric else "label", label, text=not numeric))
        columns.append(Column(_INTERVAL if numeric else "probability", probability, text=numeric or several))
        if averages(data, answers) or errors(data, answers):
            columns.append(Column("truth", lambda place: truth_of(data, place[0]) or units.NOTHING, text=True))
    rows = _places(answers, limit)
    return table("Predictions", columns, rows, _notes(data, before, answers, len(rows)))


def _recordings_grid(data: Dataset, answers: list[Answers], labels: tuple[str, ...], limit: int) -> list[Grid]:
    found = of_recordings(data, answers, labels)
    if not found:
        return []

    def label(row: RecordingAnswer) -> Cell:
        return Cell(row.label, tone="" if row.truth is None else "good" if row.truth == row.label else "bad")

    columns: list[Column[RecordingAnswer]] = [
        Column("recording", lambda row: row.id, key=True, text=True),
        Column("windows", lambda row: row.windows),
        Column("label", label, text=True),
        Column(
            "mean probability" if interval(found[0].probabilities, labels) is None else _INTERVAL,
            lambda row: _likely(row.probabilities, labels),
        ),
    ]
    notes = [f"{limit} of {len(found)} recordings shown; --limit shows more."] if limit < len(found) else []
    judged = [row.label == row.truth for row in found if row.truth is not None]
    if judged:
        columns.append(Column("truth", lambda row: row.truth or units.NOTHING, text=True))
        notes.append(f"Accuracy of recordings {units.percent(sum(judged) / len(judged))}.")
    return [table("Recordings", columns, found[:limit], notes)]


def _notes(data: Dataset, before: Seen, answers: list[Answers], shown: int) -> list[str]:
    count = sum(len(one.rows) for one in answers)
    notes = [f"{shown} of {count} samples shown; --limit shows more."] if shown < count else []
    notes += in_words(data, answers)
    if before.trained and notes:
        words = [] if before.held is None else in_words(before.held, answers)
        rest = f"On the {known(before.held)} of its test set: {words[0]}" if before.held is not None and words else ""
        notes.append(f"The run trained on {before.trained} of them. {rest or 'New ones may be answered worse.'}")
    filled = [(STAND_INS.get(one.mask, one.mask), given(one)) for one in answers]
    if masks := [f"by {stand_in} (given {some})" for stand_in, some in filled if stand_in]:
        notes.append(f"Absent modalities are filled in {', '.join(masks)}.")
    notes.append(f"Computed by {' and '.join(dict.fromkeys(one.runs_on for one in answers))}.")
    return notes


def _csv(data: Dataset, answers: list[Answers], labels: tuple[str, ...], limit: int | None) -> str:
    """A line a sample: the answer with each label's probability or a number's interval, or embeddings; the truth."""
    from edgefl.report.writers import csv_text

    widths = {m: vectors.shape[1] for one in answers for m, vectors in embeddings(one).items()}
    numeric, truths = levels_in(labels) is not None, [truth_of(data, row) for row in range(len(data))]
    spread = ["low", "high"] if numeric else [f"probability_{name}" for name in plain_names(labels)]
    head = [f"{m}_{k}" for m, width in widths.items() for k in range(width)] or ["prediction", *spread]
    told = ["truth"] if any(truths) else []
    rows: list[list[str | float | None]] = []
    for row, one, at in _places(answers, limit):
        found, own = one.prediction, embeddings(one)
        cells = [x for m, width in widths.items() for x in (own[m][at].tolist() if m in own else [None] * width)]
        if not widths:
            odds = found.probabilities[at]
            cells = [found.labels[at], *(interval(odds, labels) or odds.tolist())]
        short = [float(f"{x:.6g}") if isinstance(x, float) else x for x in cells]
        rows.append([data.ids[row], given(one), *short, *[truths[row]] * len(told)])
    return csv_text(["sample", "given", *head, *told], rows)


def _json(
    data: Dataset,
    before: Seen,
    answers: list[Answers],
    left: np.ndarray,
    bundles: Mapping[Path, Manifest],
    limit: int | None,
) -> dict[str, object]:
    def scores(some: Dataset) -> dict[str, object]:
        return {
            "accuracy": accuracy(some, answers),
            "averages": averages(some, answers),
            "errors": errors(some, answers),
        }

    def summary(some: list[Answers]) -> dict[str, object]:
        mask = next((one.mask for one in some if one.mask != "none"), "none")
        return {"samples": sum(len(one.rows) for one in some), "accuracy": accuracy(data, some), "mask": mask}

    used = dict.fromkeys(one.bundle for one in answers)
    labels = next(iter(bundles.values())).labels
    return {
        "schema": SCHEMA,
        "bundles": [manifest.name for manifest in bundles.values()],
        "samples": len(data),
        "answered": sum(len(one.rows) for one in answers),
        **scores(data),
        "trained_on": before.trained,
        "held_out": None if before.held is None else {"samples": known(before.held), **scores(before.held)},
        "runs_on": list(dict.fromkeys(one.runs_on for one in answers)),
        "untrained": sorted({part for manifest in bundles.values() for part in manifest.untrained}),
        "by_bundle": {name: summary([a for a in answers if a.bundle == name]) for name in used},
        "by_given": {given(a): summary([a]) for a in answers},
        "left_out": [{"id": data.ids[row], "has": _having(data, row)} for row in left.tolist()],
        "bad_samples": [str(problem) for problem in data.skipped],
        "notes": data.notes,
        "recordings": recording_entries(data, answers, labels),
        "predictions": [
            entry(one, at, data.ids[row], labels, truth_of(data, row)) for row, one, at in _places(answers, limit)
        ],
    }

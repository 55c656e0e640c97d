"""``edgefl predict``: an exported bundle on a file. Needs onnxruntime; neither torch nor a ledger."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from edgefl.cli.options import Format, show
from edgefl.data.arrays import npz_names
from edgefl.data.dataset import Dataset
from edgefl.data.readers import SampleError, read, target
from edgefl.data.sources import load
from edgefl.errors import DataError
from edgefl.export.bundle_format import STAND_INS, Manifest, MaskName
from edgefl.export.runtime import Answers, apply, encoders, find_bundles
from edgefl.models.spec import EncoderSpec
from edgefl.records import is_modality
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, table

#: Samples listed on a terminal when --limit says nothing.
SHOWN = 20
SCHEMA = "edgefl.predictions/1"
#: Parts that make labels of projections.
CLASSIFIER = {"task", "fusion"}
UNTRAINED = (
    "no device sent an update of the classifier in these bundles: labels are not reliable, and no accuracy is shown"
)
#: Ends of a single sample's file -> kinds of modality it may hold.
SAMPLES: dict[str, tuple[str, ...]] = {
    ".npy": ("sensor", "vision", "audio", "text"),
    ".csv": ("sensor",),
    ".png": ("vision",),
    ".jpg": ("vision",),
    ".jpeg": ("vision",),
    ".wav": ("audio",),
    ".txt": ("text",),
}


def command(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle's folder, or the folder of all bundles.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="An .npz file, a folder with manifest.jsonl, or one sample: .npy .csv .png .wav .txt."
        ),
    ],
    modality: Annotated[
        list[str] | None,
        typer.Option(help="Use only this modality of the file, or say what a single sample's file is; repeatable."),
    ] = None,
    mask: Annotated[
        MaskName | None,
        typer.Option(help="What stands in for absent modalities."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to compute.")] = "cpu",
    bad_samples: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with unreadable samples.")
    ] = "error",
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"List at most this many samples; default: {SHOWN}, all with json.")
    ] = None,
    format: Format = "terminal",  # noqa: A002  # the option's own name
) -> None:
    """Classify the samples of a file, and count how many answers are right where it has labels.

    Each sample is answered by all modalities it has. With a folder of bundles, a sample with one modality goes to that
    modality's bundle, any other to the bundle of all modalities.

    Examples: edgefl predict runs/ID/bundles runs/ID/shares/test.npz · edgefl predict bundles/acc walk.csv
    """
    bundles = find_bundles(bundle)
    data = read_input(file, encoders(bundles), next(iter(bundles.values())).labels, modality or [], bad_samples)
    if any(CLASSIFIER & set(manifest.untrained) for manifest in bundles.values()):
        sys.stderr.write(f"warning: {UNTRAINED}\n")
        data = replace(data, labels=None)
    answers, left = apply(bundles, data, mask=mask, device=device)
    if not answers:
        raise DataError(
            f"{file}: no bundle takes {_having(data, int(left[0]))} alone; "
            f"there are: {', '.join(manifest.name for manifest in bundles.values())}",
            remedy="Give the folder of all bundles, or a file that has the other modalities as well.",
        )
    for name in npz_names(file) if file.suffix.lower() == ".npz" else []:
        if is_modality(name) and name not in encoders(bundles):
            sys.stderr.write(f"not used: {name}, which no bundle here takes\n")
    for problem in data.skipped:
        sys.stderr.write(f"left out: {problem}\n")
    if len(left):
        sys.stderr.write(f"left out: {len(left)} samples with only {_having(data, int(left[0]))}: no bundle for them\n")
    body = _json(data, answers, left, bundles, limit) if format == "json" else None
    show(format, body, _grid(data, answers, limit or SHOWN))


def read_input(
    path: Path, known: Mapping[str, EncoderSpec], labels: tuple[str, ...], only: list[str], bad_samples: str
) -> Dataset:
    """The samples at ``path``, as the encoders ``known`` take them. Raises DataError."""
    unknown = [m for m in only if m not in known]
    if unknown:
        raise DataError(f"no bundle takes {', '.join(unknown)}", remedy=f"Choose from: {', '.join(known)}.")
    wanted = {m: encoder for m, encoder in known.items() if not only or m in only}
    if path.is_file() and path.suffix.lower() != ".npz":
        return _single(path, wanted)
    return load(path, bad_samples=bad_samples, modalities=wanted, label_names=labels)


#: For a recording that is longer, or shorter, than what a model was trained on.
_WINDOWS = (
    "Cut it into pieces of the rows that the encoder takes, as for training: one file each, or all in an .npz with an "
    "array [pieces, rows, channels] a modality; each piece is a sample."
)


def _single(path: Path, wanted: Mapping[str, EncoderSpec]) -> Dataset:
    """One sample of one modality: the only one that can be read from the file."""
    kinds = SAMPLES.get(path.suffix.lower())
    if kinds is None:
        raise DataError(
            f"{path}: can not be read", remedy=f"Give .npz, a folder with manifest.jsonl, or {', '.join(SAMPLES)}."
        )
    if "text" in kinds and any(c.isspace() for c in path.name):
        raise DataError(f"{path}: the name has a blank, and would be read as a text itself", remedy="Rename the file.")
    found: dict[str, np.ndarray] = {}
    refused = [f"{m} is {encoder.kind}" for m, encoder in wanted.items() if encoder.kind not in kinds]
    for m, encoder in wanted.items():
        if encoder.kind in kinds:
            try:
                found[m] = read(path.parent, path.name, target(encoder))
            except SampleError as error:
                refused.append(f"{m}: {error.message}")
    if not found:
        shaped = any(f"{m}: has shape" in told for m in wanted for told in refused)
        raise DataError(
            f"{path}: is no sample of these bundles ({'; '.join(refused)})",
            remedy=_WINDOWS if shaped else "Give another file.",
        )
    if len(found) > 1:
        raise DataError(
            f"{path}: may be {' or '.join(found)}",
            remedy=f"Say which, for instance with --modality {next(iter(found))}.",
        )
    ((m, value),) = found.items()
    return Dataset({m: value[None]}, {m: np.ones(1, dtype=bool)}, None, (), [path.name])


def accuracy(data: Dataset, answers: list[Answers]) -> float | None:
    """Share of right answers among the labelled samples; None when none has a label."""
    if data.labels is None:
        return None
    pairs = [(one.prediction.classes, data.labels[one.rows]) for one in answers if len(one.prediction.classes)]
    total = sum(int((truth >= 0).sum()) for _, truth in pairs)
    return sum(int(((found == truth) & (truth >= 0)).sum()) for found, truth in pairs) / total if total else None


def _given(one: Answers) -> str:
    return "+".join(one.modalities)


def _embeddings(one: Answers) -> dict[str, np.ndarray]:
    """Embeddings of the modalities that the samples have."""
    return {m: e for m, e in one.prediction.embeddings.items() if m in one.modalities}


def _having(data: Dataset, row: int) -> str:
    return " + ".join(m for m in data.modalities if data.present[m][row]) or "nothing"


def _truth(data: Dataset, row: int) -> str | None:
    if data.labels is None or data.labels[row] < 0:
        return None
    return data.label_names[int(data.labels[row])]


_Place = tuple[int, Answers, int]  # row of the data set, the answers that hold it, its place in them


def _places(answers: list[Answers], limit: int | None) -> list[_Place]:
    """In the data set's order."""
    places = [(int(row), one, at) for one in answers for at, row in enumerate(one.rows)]
    return sorted(places, key=lambda place: place[0])[:limit]


def _grid(data: Dataset, answers: list[Answers], limit: int) -> Grid:
    def vectors(place: _Place) -> str:
        _, answer, at = place
        texts = {m: ", ".join(f"{x:.3f}" for x in e[at][:4]) for m, e in _embeddings(answer).items()}
        return "; ".join(f"{m} [{text}, …]" for m, text in texts.items())

    def label(place: _Place) -> Cell:
        row, answer, at = place
        label, truth = answer.prediction.labels[at], _truth(data, row)
        return Cell(label, tone="" if truth is None else "good" if truth == label else "bad")

    def probability(place: _Place) -> str:
        _, answer, at = place
        return units.percent(float(answer.prediction.probabilities[at].max()))

    columns: list[Column[_Place]] = [
        Column("sample", lambda place: data.ids[place[0]], key=True, text=True),
        Column("given", lambda place: _given(place[1]), text=True),
    ]
    if not len(answers[0].prediction.classes):
        columns.append(Column("embedding", vectors, text=True))
    else:
        columns += [Column("label", label, text=True), Column("probability", probability)]
        if accuracy(data, answers) is not None:
            columns.append(Column("truth", lambda place: _truth(data, place[0]) or units.NOTHING, text=True))
    rows = _places(answers, limit)
    return table("Predictions", columns, rows, _notes(data, answers, len(rows)))


def _notes(data: Dataset, answers: list[Answers], shown: int) -> list[str]:
    count = sum(len(one.rows) for one in answers)
    notes = [f"{shown} of {count} samples shown; --limit shows more."] if shown < count else []
    share = accuracy(data, answers)
    if share is not None:
        each = [f"{_given(a)} {units.percent(value)}" for a in answers if (value := accuracy(data, [a])) is not None]
        parts = f" ({', '.join(each)})" if len(each) > 1 else ""
        notes.append(f"Accuracy {units.percent(share)}{parts}.")
    masks = [f"by {STAND_INS[one.mask]} (given {_given(one)})" for one in answers if one.mask in STAND_INS]
    if masks:
        notes.append(f"Absent modalities are filled in {', '.join(masks)}.")
    return notes


def _json(
    data: Dataset, answers: list[Answers], left: np.ndarray, bundles: Mapping[Path, Manifest], limit: int | None
) -> dict[str, object]:
    def summary(some: list[Answers]) -> dict[str, object]:
        mask = next((one.mask for one in some if one.mask != "none"), "none")
        return {"samples": sum(len(one.rows) for one in some), "accuracy": accuracy(data, some), "mask": mask}

    used = dict.fromkeys(one.bundle for one in answers)
    return {
        "schema": SCHEMA,
        "bundles": [manifest.name for manifest in bundles.values()],
        "samples": len(data),
        "answered": sum(len(one.rows) for one in answers),
        "accuracy": accuracy(data, answers),
        "untrained": sorted({part for manifest in bundles.values() for part in manifest.untrained}),
        "by_bundle": {name: summary([a for a in answers if a.bundle == name]) for name in used},
        "by_given": {_given(a): summary([a]) for a in answers},
        "left_out": [{"id": data.ids[row], "has": _having(data, row)} for row in left.tolist()],
        "bad_samples": [str(problem) for problem in data.skipped],
        "predictions": [_entry(data, row, one, at, bundles) for row, one, at in _places(answers, limit)],
    }


def _entry(data: Dataset, row: int, one: Answers, at: int, bundles: Mapping[Path, Manifest]) -> dict[str, object]:
    p = one.prediction
    entry: dict[str, object] = {"id": data.ids[row], "bundle": one.bundle, "given": list(one.modalities)}
    if not len(p.classes):
        return {**entry, "embeddings": {m: e[at].tolist() for m, e in _embeddings(one).items()}}
    names = next(iter(bundles.values())).labels
    entry |= {"label": p.labels[at], "probability": float(p.probabilities[at].max()), "truth": _truth(data, row)}
    entry["probabilities"] = dict(zip(names, p.probabilities[at].tolist(), strict=True))
    if p.matched:
        entry["matched"] = {
            m: [
                {"label": names[c] if c < len(names) else str(c), "weight": w}
                for c, w in zip(match.rows[at].tolist(), match.weights[at].tolist(), strict=True)
                if c >= 0
            ]
            for m, match in p.matched.items()
            if m not in one.modalities
        }
    return entry

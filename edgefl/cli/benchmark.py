"""``edgefl benchmark``: an exported bundle's accuracy, speed and memory on this machine. No torch, no ledger."""

from __future__ import annotations

import asyncio
import csv
import io
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer

from edgefl.api.runs import RUNS
from edgefl.cli.options import BundleArgument, RunsOption, bundle_folder, drawn, write_out
from edgefl.cli.predict import read_input, trusted
from edgefl.cli.scored import accuracy, averages, errors
from edgefl.data.dataset import Dataset
from edgefl.errors import ExportError, WorkerError
from edgefl.export.benchmark import Measured, Task, convert, exported_precisions, inputs_of
from edgefl.export.bundle_format import STAND_INS, Manifest
from edgefl.export.form import PLAIN, PRECISIONS, precisions_of
from edgefl.export.measure import BATCHES, Samples, machine, usable
from edgefl.export.precision_record import EXACT, Precision
from edgefl.export.runtime import apply, choose, encoders, find_bundles
from edgefl.export.subsets import subset_list
from edgefl.process.worker import WorkerFailedError, WorkerProcess, understood
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, amount, measure, print_grids, table

SCHEMA = "edgefl.benchmark/1"
#: Samples of a call at most: those of a request to `edgefl serve`.
MOST = 256
#: The score in the table, where it is no accuracy.
_BEST = ("r2", "mean_average_precision")


class Row(msgspec.Struct, frozen=True):
    """Figures of a bundle for one precision, subset of the modalities and batch size.

    ``samples``: those that have all of ``given``, which accuracy and errors are of; None without data. ``errors``: of a
    numeric target; of several labels a sample their averages.
    """

    precision: Precision
    given: str
    batch: int
    bundle: str
    mask: str
    samples: int | None
    accuracy: float | None
    errors: dict[str, float]
    ms_per_sample: float
    calls: int
    peak_bytes: int | None
    idle_bytes: int
    size_bytes: int
    runs_on: str


@dataclass(frozen=True)
class _Case:
    """A bundle to measure given some modalities, with the samples of all of them."""

    kind: Precision
    bundles: Mapping[Path, Manifest]
    bundle: Path
    given: tuple[str, ...]
    data: Dataset | None


def command(
    bundle: BundleArgument,
    file: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...", help="Samples with labels, as `edgefl predict` takes them, for the accuracy."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(PRECISIONS),
            help="Only this precision; repeatable. One that is not exported is made from f32 for the benchmark, which "
            "takes FILE to calibrate it. Default: all that are exported.",
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODALITY+MODALITY", help="Only these modalities at hand; repeatable. Default: every subset."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=MOST, help=f"Samples of a call; repeatable. Default: {' and '.join(map(str, BATCHES))}."
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "tensorrt"],
        typer.Option(help="Where to compute; auto: TensorRT, CUDA or the CPU, the first that works here."),
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads of onnxruntime; 0: one a core.")] = 0,
    max_loss: Annotated[
        float, typer.Option(min=0.0, help="Percentage points that a precision made here may cost any subset.")
    ] = PLAIN.max_loss,
    bad_samples: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with unreadable samples.")
    ] = "error",
    runs: RunsOption = RUNS,
    format: Annotated[  # noqa: A002  # the option's own name
        Literal["terminal", "json", "csv"], typer.Option("--format", help="How to show it.")
    ] = "terminal",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; `-` is stdout.")] = None,
) -> None:
    """Benchmark a bundle on this machine: accuracy, time and memory.

    One row for each precision, subset of the modalities and batch size, by the bundle that
    `edgefl predict` would take. Times are medians of calls. Memory is the peak of a process of its
    own for each precision and subset.

    Examples: edgefl benchmark latest · edgefl benchmark latest runs/ID/shares/test.npz --batch 1 --batch 8 ·
    edgefl benchmark bundles test.npz --precision f32 --precision int8 --given acc --threads 1
    """
    folder = bundle_folder(bundle, runs)
    places = exported_precisions(folder)
    some = find_bundles(next(iter(places.values())))
    first = next(iter(some.values()))
    data = None
    if file:
        data = read_input(file, encoders(some), first.labels, [], bad_samples, first.label_column)
        data = trusted(some, data)
    with tempfile.TemporaryDirectory(prefix="edgefl-benchmark-") as name:
        work = Path(name)
        for kind in precisions_of(precision or places):
            if kind not in places:
                places[kind] = _made(places, kind, data, max_loss, work / kind)
        rows = []
        for case in _cases({kind: places[kind] for kind in precisions_of(precision or places)}, given or [], data):
            sys.stderr.write(f"{case.kind}, given {' + '.join(case.given)}\n")
            rows += _rows(
                case, Task(str(case.bundle), "", tuple(dict.fromkeys(batch or BATCHES)), device, threads), work
            )
    write_out(output or Path("-"), _content(rows, format, threads, output is None), to_read=format == "terminal")


def _made(
    places: Mapping[Precision, Path], kind: Precision, data: Dataset | None, max_loss: float, target: Path
) -> Path:
    """A folder of the bundles in another precision, made from f32. Raises ExportError."""
    if EXACT not in places or data is None:
        lacks = "no bundles in f32 to make it from" if data is not None else "no samples to calibrate it with"
        raise ExportError(
            f"there are no bundles in {kind}, and {lacks}; there are: {', '.join(places)}",
            remedy=f"Give samples after the bundle, or `edgefl export RUN --precision f32 --precision {kind}`.",
        )
    sys.stderr.write(f"making {kind}\n")
    target.mkdir()
    for folder, manifest in find_bundles(places[EXACT]).items():
        convert(folder, target / manifest.name, kind, Samples(data, "given to the benchmark"), max_loss)
    return target


def _cases(places: Mapping[Precision, Path], wanted: Sequence[str], data: Dataset | None) -> Iterator[_Case]:
    """Every precision with every subset that its bundles answer, or those ``wanted``. Raises ExportError."""
    for kind, place in places.items():
        bundles = find_bundles(place)
        names = max((manifest.modalities for manifest in bundles.values()), key=len)
        every = tuple(dict.fromkeys((*names, *encoders(bundles))))
        subsets = [tuple(text.split("+")) for text in wanted] or subset_list(every, np.random.default_rng(0))
        for given in subsets:
            path = choose(bundles, frozenset(given))
            if path is not None:
                yield _Case(kind, bundles, path, given, _having(data, given))
            elif wanted:
                raise ExportError(
                    f"no bundle takes {' + '.join(given)} alone; there are: "
                    f"{', '.join(manifest.name for manifest in bundles.values())}",
                    remedy=f"Choose among {', '.join(every)}, as MODALITY+MODALITY.",
                )


def _having(data: Dataset | None, given: Sequence[str]) -> Dataset | None:
    """Samples of all of the modalities ``given``, with these alone."""
    if data is None:
        return None
    rows = data.subset(data.complete(given))
    kept = [m for m in data.modalities if m in given]
    return replace(rows, modalities={m: rows.modalities[m] for m in kept}, present={m: rows.present[m] for m in kept})


def _rows(case: _Case, task: Task, work: Path) -> list[Row]:
    """The case measured, a row for each batch size. Raises WorkerError where its process fails."""
    manifest, data = case.bundles[case.bundle], case.data
    most = max(task.batches)
    inputs = work / "inputs.npz"
    np.savez(inputs, **inputs_of(manifest, case.given, data, most))  # type: ignore[arg-type]
    done = _in_own_process(msgspec.structs.replace(task, inputs=str(inputs)), work / "log")
    right, wrong = None, {}
    if data is not None and len(data):
        answers, _ = apply(case.bundles, data, device=task.device)
        right = accuracy(data, answers)
        wrong = errors(data, answers) if data.sets is None else averages(data, answers)
    absent = set(manifest.fills) - set(case.given)
    return [
        Row(
            case.kind,
            "+".join(case.given),
            speed.batch,
            manifest.name,
            manifest.mask if absent else "none",
            None if data is None else len(data),
            right,
            wrong,
            speed.call_ms / speed.batch,
            speed.calls,
            speed.peak_bytes,
            done.idle_bytes,
            manifest.size_bytes,
            done.runs_on,
        )
        for speed in done.speeds
    ]


def _in_own_process(task: Task, log: Path) -> Measured:
    async def called() -> object:
        worker = WorkerProcess("edgefl.export.benchmark", [], log)
        try:
            return await worker.call("measure", task)
        finally:
            await worker.stop()

    try:
        return understood(asyncio.run(called()), Measured)
    except WorkerFailedError as error:
        if error.on_purpose:
            raise
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise WorkerError(
            ": ".join([error.message, *last]),
            remedy="A process that was killed took too much memory: try a smaller --batch.",
        ) from error


def _content(rows: Sequence[Row], form: str, threads: int, to_terminal: bool) -> str:
    if form == "terminal":
        return drawn(lambda console: print_grids([_grid(rows, threads)], console), to_terminal=to_terminal)
    if form == "json":
        body = {"schema": SCHEMA, "machine": machine(), "threads": threads or usable(), "rows": rows}
        return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
    out = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row.errors)
    plain = [name for name in Row.__struct_fields__ if name != "errors"]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*plain, *names])
    for row in rows:
        writer.writerow([*(getattr(row, name) for name in plain), *(row.errors.get(name) for name in names)])
    return out.getvalue()


def _grid(rows: Sequence[Row], threads: int) -> Grid:
    columns: list[Column[Row]] = [
        Column("precision", lambda row: row.precision, key=True, text=True),
        Column("given", lambda row: row.given, key=True, text=True),
        Column("batch", lambda row: row.batch, key=True),
    ]
    if any(row.accuracy is not None for row in rows):
        columns.append(Column("accuracy", lambda row: _share(row.accuracy)))
    best = _best(rows)
    if best:  # csv and json have the others too
        columns.append(Column(units.metric_words(best), lambda row: units.number(row.errors.get(best))))
    columns += [
        Column("a sample", lambda row: units.number(row.ms_per_sample), "ms"),
        measure("peak", lambda row: row.peak_bytes, "B", why="this system tells no peak of a process"),
        measure("file", lambda row: row.size_bytes, "B"),
    ]
    return table("Benchmark", columns, rows, _notes(rows, threads))


def _best(rows: Sequence[Row]) -> str:
    """The score in the table of rows without an accuracy; "": they have one, or none."""
    return next((name for name in _BEST if any(name in row.errors for row in rows)), "")


def _share(value: float | None) -> Cell:
    if value is None:
        return Cell(units.NOTHING, why="no labelled sample has these modalities", tone="dim")
    return Cell(units.percent(value))


def _notes(rows: Sequence[Row], threads: int) -> Iterator[str]:
    counts = {row.given: row.samples for row in rows if row.samples is not None}
    score = units.metric_words(_best(rows) or "accuracy")
    score = score[0].upper() + score[1:]
    if counts and any(row.errors or row.accuracy is not None for row in rows):
        each = ", ".join(f"{given} {count}" for given, count in counts.items())
        even = len({*counts.values()}) == 1
        yield (
            f"{score} of {next(iter(counts.values()))} samples."
            if even
            else (f"{score} of the samples that have what is given: {each}.")
        )
    words = (STAND_INS.get(row.mask, row.mask) for row in rows)
    if filled := dict.fromkeys(filter(None, words)):
        yield f"Absent modalities are filled in by {' or '.join(filled)}."
    calls = sorted({row.calls for row in rows})
    yield f"Time: median of {' to '.join(map(str, dict.fromkeys((calls[0], calls[-1]))))} calls, after one to warm up."
    idle = max(row.idle_bytes for row in rows)
    yield (
        "Peak: resident memory of a process with this bundle alone; Python and onnxruntime take "
        f"{amount(idle, 'B').text} MiB of it."
    )
    yield f"On {machine()}, {threads or usable()} threads, {' and '.join(dict.fromkeys(row.runs_on for row in rows))}."

"""``edgefl init``: from a folder or file of the user's own to a manifest and a run file that runs as it is."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from edgefl.api.runs import write_file
from edgefl.cli.options import Format, show
from edgefl.config.yaml_files import yaml_text
from edgefl.console import safe_text
from edgefl.data.dataset import Dataset
from edgefl.data.recording import is_number
from edgefl.data.sources import load
from edgefl.errors import DataError, StoreError
from edgefl.own_data.checkpoints import checkpoints, suggestion
from edgefl.own_data.draft import SIZES, Outline, Paths, Wishes, encoders, recipe_for, run_values
from edgefl.own_data.facts import Facts, facts_of
from edgefl.own_data.npz import facts_of_arrays, read_arrays, write_arrays
from edgefl.own_data.samples import MANIFEST, halves, understand
from edgefl.own_data.table_samples import MADE
from edgefl.own_data.understood import Understood
from edgefl.own_data.wishes import MODALITY_KINDS, Roles, wished

SHOWN = 5  # classes, groups and unused files that are named


class Source(NamedTuple):
    """A data set as EdgeFL reads it. ``path``: folder with a manifest, or .npz; ``written``: files made for it."""

    path: Path
    facts: dict[str, Facts]
    outline: Outline
    said: list[str]
    unused: dict[str, str]
    test: Path | None = None
    written: tuple[Path, ...] = ()
    label: str = ""  # the column of a table that labels came from


class Started(msgspec.Struct, frozen=True):
    """The result as JSON."""

    source: str = ""
    run_file: str = ""
    understood: tuple[str, ...] = ()
    unused: dict[str, str] = {}
    size: str = ""
    fits: bool = True
    verdict: str = ""


def command(
    source: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="A folder of files, a table, or an .npz file.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Run file to write; default: NAME.yaml here.")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="PROFILE", help="Profile of a device that will train; one a device, repeatable."),
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            metavar="TEMPLATE", help="What the files' paths say, such as {group}/{label}/{id}; default: guessed."
        ),
    ] = "",
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of a table that is to be learned; default: guessed.")
    ] = "",
    group: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of a table that says who or what a row is of.")
    ] = "",
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Column of a table that is left out; repeatable.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=KIND",
            help="Kind of a table's column (number, category, date, text), or of a modality (sensor, table, vision, "
            "audio, text); repeatable.",
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that cannot be read, now and in the run.")
    ] = False,
    recipe: Annotated[str, typer.Option(help="Recipe of the run; default: by what the data has.")] = "",
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Begin with the checkpoint that a package brings (text: extra minilm).")
    ] = False,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]FOLDER",
            help="Begin a modality of texts or pictures with a checkpoint of transformers; repeatable.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing, also at a terminal.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a manifest and a run file that are there.")
    ] = False,
    format: Format = "terminal",  # noqa: A002 - the option's own name
) -> None:
    """Look at data of your own; write its manifest, and a run file that runs as it is.

    Reads folders of pictures, sounds, texts and sensor files (labels and people by sub-folder, file name or table),
    tables (.csv, .tsv, .parquet, .json, .jsonl) of files, of time steps or of features, and .npz files. Says what it
    took for what, what else the label could be, and what it left out, chooses encoders that fit the devices, and ends
    with the plan's verdict.

    Examples: edgefl init photos · edgefl init cars.csv --label origin --drop name · edgefl init walks.csv --device
    raspberry-pi-5 --device gpu-box · edgefl init data --path '{group}/{label}/{id}'
    """
    if not source.exists():
        raise DataError(f"{source} does not exist", remedy="Give a folder, a table or an .npz file.")
    asks = sys.stdin.isatty() and not yes and format == "terminal"
    name = _run_name(source)
    run_file = out or Path(f"{name}.yaml")
    if run_file.exists() and not force:
        raise StoreError(f"{run_file} is there already", remedy="Name another by --out, or write over it by --force.")
    roles = wished(label, group, drop or [], kind or [])
    with _undone(source, run_file):
        if source.suffix.lower() == ".npz":
            data = _arrays(source, roles)
        else:
            data = _files(source, path, roles, asks=asks, force=force, skip_bad=skip_bad)
        _check_task(source, recipe, data)
        kinds = {} if _is_arrays(data) else {modality: each.kind for modality, each in data.facts.items()}
        begun = checkpoints(kinds, packaged=pretrained, folders=checkpoint or ())
        devices = tuple(device or (_ask_devices() if asks else ()))
        wishes = Wishes(devices, recipe=recipe, skip_bad=skip_bad, pretrained=begun)
        if format == "terminal":
            _say(source, data)
        size, fits, sentence = _write_fitting(run_file, name, data, wishes)
    chosen = encoders(data.facts, size, raw=not _is_arrays(data), pretrained=begun)
    if format == "json":
        show("json", Started(str(data.path), str(run_file), tuple(data.said), data.unused, size, fits, sentence))
        return
    for modality, fields in chosen.items():
        typer.echo(f"  {modality} is given to {_in_words(fields)}")
    for made in (*data.written, run_file):
        typer.echo(f"wrote {made}")
    if not begun and (idea := suggestion(kinds)):
        typer.echo(f"tip: {idea}")
    typer.secho(f"\n{sentence}", bold=True)
    typer.echo(f"\nNext: edgefl run {run_file}\nThen: edgefl predict latest FILE, with a file of yours")


def _check_task(source: Path, recipe: str, data: Source) -> None:
    """Raise DataError where nothing can be learned."""
    if not (recipe or recipe_for(data.outline, len(data.facts))):
        raise DataError(
            f"{source}: one modality ({next(iter(data.facts))}) and no label: there is nothing to learn",
            remedy="Put the files into a folder a label, name labels in a table, or say by --path where the label is.",
        )


@contextmanager
def _undone(source: Path, run_file: Path) -> Iterator[None]:
    """Leave nothing behind that an unfinished ``init`` wrote: manifests, recordings, arrays, the run file."""
    root = source if source.is_dir() else source.parent
    halved = [root, *(path for path in root.iterdir() if path.is_dir())]
    beside = (f"{source.stem}-edgefl", f"{source.stem}-edgefl.npz", f"{source.stem}-edgefl-test.npz")
    made = [folder / name for folder in halved for name in (MANIFEST, MADE)] + [root / name for name in beside]
    there = {path for path in (*made, run_file) if path.exists()}
    try:
        yield
    except BaseException:
        for path in {*made, run_file} - there:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise


def _run_name(source: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", (source.resolve().stem if source.is_file() else source.resolve().name))
    return name.strip("-_")[:40] or "own"


def _ask_devices() -> list[str]:
    told = typer.prompt(
        "Which devices will train (profiles, with blanks between)? Empty: this machine", default="", show_default=False
    )
    return str(told).split()


def _files(source: Path, template: str, roles: Roles, *, asks: bool, force: bool, skip_bad: bool) -> Source:
    """A folder or a table; each half of it gets a manifest."""
    train, test = halves(source)
    if (train / MANIFEST).is_file() and train.is_dir() and not force:
        return _with_manifest(train, test if test is not None and (test / MANIFEST).is_file() else None)
    found = understand(train, template, roles)
    if asks and found.layout and not template:
        told = str(typer.prompt(f"Paths are read as {found.layout}. Enter, or another template", default=found.layout))
        found = understand(train, told, roles) if told != found.layout else found
    _change_kinds(found, roles)
    _check_labels(source, found)
    held = understand(test, found.layout, roles) if test is not None else None
    facts = {modality: facts_of(found, modality, skip_bad=skip_bad) for modality in sorted(found.kinds)}
    written = _write_manifests([found] if held is None else [found, held], force=force)
    said = list(found.said)
    if held is not None:
        said.append(f"{held.root.name} is the test set, of {len(held.samples)} samples")
    outline = Outline(len(found.samples), bool(found.labels), len(found.groups))
    return Source(
        found.root,
        facts,
        outline,
        [*_counted(found), *said],
        found.unused,
        held.root if held is not None else None,
        written,
        found.label_column,
    )


def _change_kinds(found: Understood, roles: Roles) -> None:
    """The kinds of modalities as the user says. Raises DataError for one that reads other files."""
    for modality, kind in roles.kinds.items():
        if modality in found.kinds and kind != found.kinds[modality]:
            names = [str(sample.values[modality]) for sample in found.samples if modality in sample.values]
            if kind not in MODALITY_KINDS or not all(name.lower().endswith(".npy") for name in names):
                raise DataError(
                    f"--kind {modality}={kind}: {modality} is {found.kinds[modality]} by its files",
                    remedy="Store arrays as .npy, of which the kind cannot be seen; or leave this option out.",
                )
            found.kinds[modality] = kind


def _check_labels(source: Path, found: Understood) -> None:
    """Raise DataError where all labels are one: there is nothing to tell apart."""
    if len(found.labels) == 1:
        ((name, count),) = found.labels.items()
        column = f" (column {found.label_column})" if found.label_column else ""
        raise DataError(
            f"{source}: all {count} labels{column} are {name!r:.60}: there is nothing to tell apart",
            remedy="Add samples of another class, or name another column by --label.",
        )


def _write_manifests(parts: Sequence[Understood], *, force: bool) -> tuple[Path, ...]:
    """All or none. Raises StoreError where one is there, unless it may be written over."""
    paths = tuple(part.root / MANIFEST for part in parts)
    if not force and (there := [path for path in paths if path.exists()]):
        raise StoreError(f"{there[0]} is there already", remedy="Move it away, or write over it by --force.")
    for part, path in zip(parts, paths, strict=True):
        write_file(
            path, b"".join(msgspec.json.encode(sample.line(numeric=part.numeric)) + b"\n" for sample in part.samples)
        )
    return paths


def _counted(found: Understood) -> list[str]:
    """How many samples there are, by modality, label and group."""
    having = {m: sum(m in sample.values for sample in found.samples) for m in sorted(found.kinds)}
    count = len(found.samples)
    listed = ", ".join(
        f"{m} ({found.kinds[m]}{'' if have == count else f', {have} of them'})" for m, have in having.items()
    )
    told = [f"{count} samples of {listed}"]
    for noun, counts in (("label", found.labels), ("group", found.groups)):
        if counts and noun == "label" and found.numeric:
            numbers = [float(label) for label in counts if is_number(label)]
            told.append(f"{counts.total()} labels from {min(numbers):g} to {max(numbers):g}")
        elif counts:
            named = ", ".join(f"{name} {n}" for name, n in counts.most_common(SHOWN))
            more = f", … and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
            told.append(f"{len(counts)} {noun}{'' if len(counts) == 1 else 's'}: {named}{more}")
    if not found.labels:
        told.append("no labels were found")
    return told


def _with_manifest(folder: Path, test: Path | None) -> Source:
    """A folder with a manifest of the user's own, read as it is."""
    data = load(folder)
    facts = facts_of_arrays(data)
    return Source(folder, facts, _outline(data), [f"{folder / MANIFEST} is used as it is", *_told(data)], {}, test)


def _outline(data: Dataset) -> Outline:
    groups = 0 if data.groups is None else len(set(data.groups.tolist()))
    return Outline(len(data), data.labels is not None, groups)


def _told(data: Dataset) -> list[str]:
    shapes = ", ".join(f"{m} {list(shape)}" for m, shape in data.signature().items())
    return [
        f"{len(data)} samples of {shapes}",
        f"{len(data.label_names)} labels: {', '.join(data.label_names[:SHOWN])}",
    ]


def _arrays(source: Path, roles: Roles) -> Source:
    """An .npz file; a copy with other names where they are not those that EdgeFL reads."""
    arrays = read_arrays(source)
    own = not (arrays.renamed or arrays.unused or arrays.test)
    path, test, written = source, None, []
    if not own:
        path = source.with_name(f"{source.stem}-edgefl.npz")
        write_arrays(arrays.train, path)
        written = [path]
    if arrays.test:
        test = source.with_name(f"{source.stem}-edgefl-test.npz")
        write_arrays(arrays.test, test)
        written.append(test)
    data = Dataset.load_npz(path)
    rows = {name for name, array in arrays.train.items() if array.ndim == 2}
    facts = facts_of_arrays(data, rows, roles.kinds)
    said = _told(data) + [f"the array {old} is the {new}" for old, new in arrays.renamed.items()]
    if test is not None:
        said.append(f"the array of the split tells a test set of {len(next(iter(arrays.test.values())))} samples apart")
    return Source(path, facts, _outline(data), said, dict(arrays.unused), test, tuple(written))


def _say(source: Path, data: Source) -> None:
    typer.echo(f"{source}:")
    for sentence in data.said:
        typer.echo(f"  {safe_text(sentence)}")
    for name, why in list(data.unused.items())[:SHOWN]:
        typer.echo(f"  not used: {safe_text(name)} ({safe_text(why)})")
    if (more := len(data.unused) - SHOWN) > 0:
        typer.echo(f"  not used: {more} more")


def _write_fitting(run_file: Path, name: str, data: Source, wishes: Wishes) -> tuple[str, bool, str]:
    """Write the run file with the richest encoders that fit every device: (their size, all fit, the verdict)."""
    from edgefl.api.run_inputs import PlanOptions, price_of
    from edgefl.report.verdict import verdict

    base = run_file.resolve().parent
    test = _relative(data.test, base) if data.test is not None else ""
    paths = Paths(name, _relative(data.path, base), test, arrays=_is_arrays(data), label=data.label)
    for size in SIZES:
        values = run_values(paths, data.facts, data.outline, wishes._replace(size=size))
        write_file(run_file, _head(data.said) + yaml_text(values, width=100))
        price = price_of(str(run_file), [], PlanOptions())
        fits = not any(plan.placement.refusal for plan in price.devices)
        if fits:
            break
    return size, fits, verdict(price)


def _in_words(fields: Mapping[str, object]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in {"kind", "size", "columns"})
    return f"a {fields.get('size', 'frozen')} {fields['kind']} encoder" + (f": {rest}" if rest else "")


def _is_arrays(data: Source) -> bool:
    return data.path.suffix == ".npz" or not data.written


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.resolve(), base)).as_posix()


def _head(said: Sequence[str]) -> str:
    lines = "".join(f"#   {safe_text(sentence)}\n" for sentence in said)
    return f"# Written by `edgefl init`. What it understood:\n{lines}# Every field: docs/configuration.md\n"

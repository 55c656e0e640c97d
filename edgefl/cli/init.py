"""``edgefl init``: from a folder or file of the user's own to a manifest and a run file that runs as it is."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from edgefl.api.runs import write_file
from edgefl.cli.options import Format, show
from edgefl.config.yaml_files import yaml_text
from edgefl.console import safe_text
from edgefl.data.folder import MANIFEST
from edgefl.errors import DataError, StoreError
from edgefl.own_data.checkpoints import checkpoints, suggestion
from edgefl.own_data.draft import SIZES, Paths, Wishes, encoders, run_values
from edgefl.own_data.source import Source, check_task, from_arrays, from_files, manifest_beside
from edgefl.own_data.table_samples import MADE
from edgefl.own_data.wishes import wished

SHOWN = 5  # unused files that are named
WIDTH = 80


class Started(msgspec.Struct, frozen=True):
    """The result as JSON."""

    source: str = ""
    run_file: str = ""
    understood: tuple[str, ...] = ()
    unused: dict[str, str] = {}
    size: str = ""
    fits: bool = True
    verdict: str = ""
    warnings: tuple[str, ...] = ()


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
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of a table that is to be learned; default: guessed. Repeated: columns of 0 and 1 each.",
        ),
    ] = None,
    task: Annotated[
        Literal["", "classes", "multilabel", "number"],
        typer.Option(
            help="What labels are: classes, one a sample; multilabel, several; a number. Default: guessed.",
            show_default=False,
        ),
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
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE", help="Test set, like FOLDER|FILE; default: test/ in it, else held out of it."
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
    roles = wished(label or [], group, drop or [], kind or [], task)
    folder = f"{'-'.join(dict.fromkeys([source.stem, (out or source).stem]))}-edgefl"
    if test is not None and (source.suffix.lower() == ".npz" or not test.exists()):
        why = "does not exist" if not test.exists() else "an .npz file marks its own test set (array split)"
        raise DataError(f"--test {test}: {why}", remedy="Give a folder or a table beside a folder or a table.")
    with _undone([source, *filter(None, [test])], run_file, folder):
        if source.suffix.lower() == ".npz":
            data = from_arrays(source, roles)
        else:
            data = from_files(
                source,
                path,
                roles,
                other_layout=_ask_layout if asks else lambda layout: layout,
                run_file=run_file,
                force=force,
                skip_bad=skip_bad,
                made=folder,
                test=test,
            )
        check_task(source, recipe, data)
        kinds = {} if _is_arrays(data) else {modality: each.kind for modality, each in data.facts.items()}
        begun = checkpoints(kinds, packaged=pretrained, folders=checkpoint or ())
        devices = tuple(device or (_ask_devices() if asks else ()))
        wishes = Wishes(devices, recipe=recipe, skip_bad=skip_bad, pretrained=begun)
        if format == "terminal":
            _say(source, data)
            sys.stderr.write("pricing each device's stages …\n")
        size, fits, sentence, warnings = _write_fitting(run_file, name, data, wishes)
    chosen = encoders(data.facts, size, raw=not _is_arrays(data), pretrained=begun)
    if format == "json":
        said = tuple(data.said)
        show("json", Started(str(data.path), str(run_file), said, data.unused, size, fits, sentence, warnings))
        return
    for modality, fields in chosen.items():
        typer.echo(f"  {modality} is given to {_in_words(fields)}")
    for made in (*data.written, run_file):
        typer.echo(f"wrote {made}")
    if not begun and (idea := suggestion(kinds)):
        typer.echo(f"tip: {idea}")
    typer.secho(f"\n{sentence}", bold=True)
    for text in warnings:
        typer.secho(f"warning: {safe_text(text)}", fg="yellow")
    same = source if source.is_file() else data.path
    without = (
        "" if devices else "   (without a broker, memory not measured: --in-process)"
    )  # profiles have budgets of it
    typer.echo(f"\nNext: edgefl run {shlex.quote(str(run_file))}{without}")
    typer.echo(f"Then: edgefl predict latest {shlex.quote(str(same))}, or files like it")


@contextmanager
def _undone(sources: Sequence[Path], run_file: Path, made_folder: str) -> Iterator[None]:
    """Leave nothing behind that an unfinished ``init`` wrote: manifests, recordings, arrays, the run file."""
    made = []
    for source in sources:
        root = source if source.is_dir() else source.parent
        halved = [root, *(path for path in root.iterdir() if path.is_dir())]
        folders = {made_folder, f"{source.stem}-edgefl"}
        beside = (*folders, f"{source.stem}-edgefl.npz", f"{source.stem}-edgefl-test.npz")
        made += [folder / name for folder in halved for name in (MANIFEST, MADE)] + [root / name for name in beside]
        made += [manifest_beside(run_file, place) for place in (*halved, *(root / name for name in folders))]
    there = {path for path in (*made, run_file) if path.exists()}
    try:
        yield
    except BaseException:
        for path in {*made, run_file} - there:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.exists():  # on a medium that is read-only even an absent one cannot be taken away
                path.unlink()
        raise


def _run_name(source: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", (source.resolve().stem if source.is_file() else source.resolve().name))
    return name.strip("-_")[:40] or "own"


def _ask_devices() -> list[str]:
    told = typer.prompt(
        "Which devices will train (profiles, with blanks between)? Empty: this machine", default="", show_default=False
    )
    return str(told).split()


def _ask_layout(layout: str) -> str:
    return str(typer.prompt(f"Paths are read as {layout}. Enter, or another template", default=layout))


def _say(source: Path, data: Source) -> None:
    typer.echo(f"{source}:")
    for sentence in data.said:
        typer.echo(_wrapped(sentence, "  "))
    for name, why in list(data.unused.items())[:SHOWN]:
        typer.echo(_wrapped(f"not used: {name} ({why})", "  "))
    if (more := len(data.unused) - SHOWN) > 0:
        typer.echo(f"  not used: {more} more")


def _wrapped(sentence: str, before: str) -> str:
    """A sentence in lines of a terminal."""
    text, inner = safe_text(sentence), f"{before}  "
    return textwrap.fill(text, WIDTH, initial_indent=before, subsequent_indent=inner, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def _write_fitting(run_file: Path, name: str, data: Source, wishes: Wishes) -> tuple[str, bool, str, tuple[str, ...]]:
    """Write the run file with the richest encoders that fit every device.

    (Their size, all fit, the verdict, warnings of the plan.)
    """
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
    return size, fits, verdict(price), price.warnings


def _in_words(fields: Mapping[str, object]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in {"kind", "size", "columns"})
    return f"a {fields.get('size', 'frozen')} {fields['kind']} encoder" + (f": {rest}" if rest else "")


def _is_arrays(data: Source) -> bool:
    return data.path.suffix == ".npz" and data.path.is_file()


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path.resolve(), base)).as_posix()


def _head(said: Sequence[str]) -> str:
    lines = "".join(_wrapped(sentence, "#   ") + "\n" for sentence in said)
    return f"# Written by `edgefl init`. What it understood:\n{lines}# Every field: docs/configuration.md\n"

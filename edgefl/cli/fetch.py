"""``edgefl data fetch``: a public data set by name."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.errors import DataError

if TYPE_CHECKING:
    from edgefl.fetch.registry import Source


def command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, such as har_hapt; another word lists them.")],
    into: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="EDGEFL_DATA", help="Folder of data sets, else ~/.local/share/edgefl/data."),
    ] = None,
    place: Annotated[
        str, typer.Option("--from", metavar="FILE|URL", help="The archive on this disk, or at another https address.")
    ] = "",
    sha256: Annotated[
        str, typer.Option("--sha256", metavar="HEX", help="The archive's hash as you know it, instead of EdgeFL's.")
    ] = "",
    accept_first_seen: Annotated[
        bool, typer.Option("--accept-first-seen", help="Take the archive whatever its hash, and tell the hash.")
    ] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the licence that is shown, without being asked.")
    ] = False,
) -> None:
    """Download a public data set, check it, and convert it to what runs read, once.

    Shows the source and its licence first, which you accept. A download that was cut off goes on where it stopped, and
    the data set's folder appears whole or not at all. Proxies: https_proxy and no_proxy.

    Example: edgefl data fetch har_hapt
    """
    from edgefl.api.needs import explained
    from edgefl.data.named import data_home
    from edgefl.fetch.fetching import FetchOptions, fetch
    from edgefl.fetch.registry import source

    found = source(name)
    _show(found)
    _accept(found.name, accepted=accept_licence)
    options = FetchOptions(into, place, sha256, accept_first_seen)
    with _bar(found.name) as progress:
        done = explained("data fetch")(fetch)(found, options, progress)
    if done.already:
        typer.echo(f"{done.folder} is there already; delete it to fetch it again.")
        return
    typer.echo(f"{done.folder} is ready (sha256 of the archive: {done.sha256}).")
    if done.folder.parent != data_home():
        typer.echo(f"Runs find it with: export EDGEFL_DATA={done.folder.parent.resolve()}")
    for run in found.runs:
        typer.echo(f"Next: edgefl run {run}")


def _show(found: Source) -> None:
    known = "not known" if found.sha256 is None else f"{found.sha256} ({found.checksum_source})"
    for label, text in {
        "data set": found.title,
        "source": f"{found.page}, {found.bytes / 2**20:.0f} MiB",
        "sha256": known,
        "licence": found.licence,
        "cite": found.cite,
        "makes": found.makes,
    }.items():
        lines = textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)
        sys.stderr.write(textwrap.indent("\n".join(lines), " " * 10).replace(" " * 10, f"{label:>8}  ", 1) + "\n")


def _accept(name: str, *, accepted: bool) -> None:
    """Have the user accept the licence. Raises DataError."""
    if accepted:
        return
    if not sys.stdin.isatty() or not typer.confirm("Do you accept the licence?", err=True):
        raise DataError(
            f"{name}: its licence is not accepted, and nothing was downloaded",
            remedy="Read it above; if you accept it, add --accept-licence.",
        )


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, drawn on terminals alone."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total)

        yield progress

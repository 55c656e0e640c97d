"""``edgefl data fetch``: a public data set by name."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.errors import DataError

if TYPE_CHECKING:
    from edgefl.fetch.fetching import Source


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
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the licence that is shown, without being asked.")
    ] = False,
) -> None:
    """Download a public data set, check it, and convert it to what runs read, once.

    Shows the source and its licence first, which you accept. The data set's folder appears whole or not at all.
    Proxies: https_proxy and no_proxy.

    Example: edgefl data fetch har_hapt
    """
    from edgefl.api.needs import explained
    from edgefl.data.named import data_home
    from edgefl.fetch.fetching import fetch, source, with_hash

    found = source(name)
    if sha256:
        found = with_hash(found, sha256)
    _show(found)
    _accept(found.name, accepted=accept_licence)
    done = explained("data fetch")(fetch)(found, into, place)
    if done.already:
        typer.echo(f"{done.folder} is there already; delete it to fetch it again.")
        return
    typer.echo(f"{done.folder} is ready (sha256 of the archive: {found.sha256}).")
    if done.folder.parent != data_home():
        typer.echo(f"Runs find it with: export EDGEFL_DATA={done.folder.parent.resolve()}")
    for run in found.runs:
        typer.echo(f"Next: edgefl run {run}")


def _show(found: Source) -> None:
    for label, text in {
        "data set": found.title,
        "source": f"{found.page}, {found.bytes / 2**20:.0f} MiB",
        "sha256": f"{found.sha256} ({found.checksum_source})",
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

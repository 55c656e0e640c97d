"""A public data set from its archive to the folder that ``edgefl.data.named`` reads.

The public data sets that EdgeFL can fetch: a file each below profiles/datasets, with source, hash and licence.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import pydantic
from pydantic import Field

from edgefl.config.profiles import profiles_folder, shipped
from edgefl.config.yaml_files import Name, Values, read_yaml, valid_names, validate
from edgefl.console import safe_text
from edgefl.data.arrays import Array, write_npz
from edgefl.data.named import data_home
from edgefl.errors import DataError
from edgefl.fetch import hapt
from edgefl.storage.disk import store_errors, write_new

FOLDER = "datasets"
Sha256 = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]
#: Name of a converter -> from an archive to arrays.
CONVERTERS: dict[str, Callable[[Path], dict[str, Array]]] = {"hapt": hapt.convert}
#: Beside the arrays: where they come from, under which licence, by which hash.
ORIGIN = "origin.json"
#: Archives until they are converted, below the folder of data sets.
PARTS = ".fetch"
#: Of silence before a server counts as gone.
STALL_S = 30


class Source(Values):
    """A data set and its archive."""

    name: Name = Field(description="the data set's name, and its folder's")
    title: str = Field(description="its title at the source")
    page: str = Field(description="the source's own page")
    url: Annotated[str, pydantic.StringConstraints(pattern="^https://")] = Field(description="the archive")
    bytes: Annotated[int, Field(gt=0)] = Field(description="size of the archive")
    sha256: Sha256 = Field(description="of the archive")
    checksum_source: str = Field(description="where the hash comes from")
    licence: str = Field(description="its licence, as the source words it")
    cite: str = Field(description="the publication to cite")
    converter: Literal["hapt"] = Field(description="turns the archive into arrays")
    makes: str = Field(description="the file that is made, and its arrays")
    runs: list[str] = Field(default_factory=list, description="shipped runs that train on it")


class Fetched(NamedTuple):
    """A data set's folder, and whether it was there already."""

    folder: Path
    already: bool = False


def source(name: str) -> Source:
    """The data set ``name``. Raises DataError naming those that there are."""
    names = shipped(FOLDER)
    if name not in names:
        raise DataError(f"no data set {name!r} can be fetched", remedy=f"{valid_names(name, names)}.".capitalize())
    file = profiles_folder() / FOLDER / f"{name}.yaml"
    values, lines = read_yaml(file)
    return validate(Source, values, str(file), lines)


def with_hash(source: Source, sha256: str) -> Source:
    """The data set with an archive of another hash, which the user trusts. Raises DataError."""
    if not re.fullmatch(r"[0-9a-f]{64}", sha256 := sha256.strip().lower()):
        raise DataError(f"{sha256[:80]!r} is no sha256", remedy="Give its 64 hexadecimal digits.")
    return source.model_copy(update={"sha256": sha256, "checksum_source": "given"})


def fetch(source: Source, into: Path | None = None, place: str = "") -> Fetched:
    """Download, check and convert a data set. Raises DataError, StoreError.

    ``into``: the folder of data sets, default EDGEFL_DATA, else the user's own; ``place``: another address, or a file
    on this disk. The data set's folder appears whole or not at all, and is left alone once it is there. A download
    is kept until it is converted.
    """
    home = into or data_home()
    folder = home / source.name
    if folder.exists():
        return Fetched(folder, already=True)
    parts = home / PARTS
    with store_errors("create", parts):
        parts.mkdir(parents=True, exist_ok=True)
    arrays = CONVERTERS[source.converter](_archive(source, place, parts))
    with store_errors("write", folder), tempfile.TemporaryDirectory(dir=parts) as work:
        new = Path(work) / source.name
        write_npz(new / f"{source.name}.npz", arrays)
        origin = {**source.model_dump(), "url": place or source.url}
        write_new(new / ORIGIN, msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")
        new.rename(folder)
    shutil.rmtree(parts, ignore_errors=True)
    return Fetched(folder)


def _archive(source: Source, place: str, folder: Path) -> Path:
    """The archive on this disk, its hash checked. Raises DataError, StoreError."""
    import pooch

    if place and "://" not in place:
        if not Path(place).is_file():
            raise DataError(f"{place}: there is no such file", remedy="Name the archive as downloaded by hand.")
        if (has := pooch.file_hash(place)) != source.sha256:
            remedy = "Give that of the file by --sha256 if you trust it."
            raise DataError(f"{place}: has the sha256 {has}, not {source.sha256}", remedy=remedy)
        return Path(place)
    url = place or source.url
    pooch.get_logger().setLevel("WARNING")
    try:
        get = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=STALL_S)
        return Path(pooch.retrieve(url, source.sha256, f"{source.name}.zip", folder, downloader=get))
    except (OSError, ValueError) as error:  # no connection, refused by the server; another hash, no address
        raise DataError(
            f"{safe_text(url)}: {safe_text(str(error))}",
            remedy="Behind a proxy set https_proxy; --from FILE takes an archive that was downloaded by hand. If the "
            "hash differs, the source has another file than it had, or somebody on the way has changed it: --sha256 "
            "names the hash of one that you trust.",
        ) from error

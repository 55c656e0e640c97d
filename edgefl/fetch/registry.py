"""The public data sets that EdgeFL can fetch: a file each below profiles/datasets, with source, hash and licence."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from edgefl.config.profiles import profiles_folder, shipped
from edgefl.config.yaml_files import Name, Values, read_yaml, valid_names, validate
from edgefl.errors import DataError

FOLDER = "datasets"
Sha256 = Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Source(Values):
    """A data set and its archive. What cannot be known is left out, and then asked of the user."""

    name: Name = Field(description="the data set's name, and its folder's")
    title: str = Field(description="its title at the source")
    page: str = Field(description="the source's own page")
    url: Annotated[str, pydantic.StringConstraints(pattern="^https://")] = Field(description="the archive")
    bytes: Annotated[int, Field(gt=0)] = Field(description="size of the archive")
    sha256: Sha256 | None = Field(None, description="of the archive; none: not known")
    checksum_source: str = Field("", description="where the hash comes from")
    licence: str = Field(description="its licence, as the source words it")
    cite: str = Field(description="the publication to cite")
    converter: Literal["hapt"] = Field(description="turns the archive into arrays")
    makes: str = Field(description="the file that is made, and its arrays")
    runs: list[str] = Field(default_factory=list, description="shipped runs that train on it")


def source(name: str) -> Source:
    """The data set ``name``. Raises DataError naming those that there are."""
    names = shipped(FOLDER)
    if name not in names:
        raise DataError(f"no data set {name!r} can be fetched", remedy=f"{valid_names(name, names)}.".capitalize())
    file = profiles_folder() / FOLDER / f"{name}.yaml"
    values, lines = read_yaml(file)
    return validate(Source, values, str(file), lines)

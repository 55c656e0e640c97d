"""docs/configuration.md: every field, slot, option, shipped profile and size, and the formats of data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgefl.config.profiles import profiles_folder, shipped
from edgefl.config.settings import DeviceProfile, RunConfig
from edgefl.config.slots import RecipeFile
from edgefl.config.yaml_files import MAX_FILE_BYTES
from edgefl.encoder_kinds import OWN
from edgefl.registry import methods
from edgefl.roles import ROLES
from pages.data import data_section
from pages.fields import as_yaml, model_section
from pages.markdown import GENERATED, table

INTRODUCTION = """\
# Configuration

Look up here every field of a run file, a recipe and a device profile, with its type, default and meaning.

A **run file** says what is trained, on which data, by which devices; it names a **recipe** (the method) and, for local
mode, a **device profile** for each device. All three are YAML. A name without a folder or `.yaml` is a shipped one.
`--set a.b=c` on a command line overrides a field, and may be repeated; lists take an index
(`--set fleet.0.profile=gpu-box`).

Paths in a run file (`data.source`, `data.test`, `recipe`, a device's `profile`) are relative to the file, those given
by `--set` to the working directory. Where nothing is beside the file and something is in the working directory, that
is used, with a warning.

Every problem of a file is reported at once, with its line, its path and the valid choices; the exit code is 10. A field
that is not listed here is an error, and so is one that is given twice. Amounts of bytes are numbers or text such as
`600 MiB`, `1.5 GiB` or `2 MB`. Files are at most {limit} MiB.
"""
SLOT_TEXT = """\
A recipe fills each role with one of these choices, alone (`missing: zero`) or with options
(`objective: {{clip: {{temperature: 0.1}}}}`). A run file's `slots` replace the recipe's, role by role. Several choices
at once: {plural} (its terms are summed). Other packages add choices (CONTRIBUTING.md); `cluster: pacfl` and
`select: banzhaf_sampled` are in [examples/edgefl_extra](../examples/edgefl_extra/README.md).
"""


def configuration() -> Iterator[str]:
    """Lines of the page."""
    yield GENERATED
    yield INTRODUCTION.format(limit=MAX_FILE_BYTES // 2**20)
    yield from model_section("Run file", RunConfig)
    yield from _slots()
    yield from model_section("Recipe file", RecipeFile)
    yield from model_section("Device profile", DeviceProfile)
    yield from _shipped()
    yield from _sizes()
    yield from data_section()


def _slots() -> Iterator[str]:
    yield "## Slots\n"
    yield SLOT_TEXT.format(plural=", ".join(f"`{role}`" for role, one in ROLES.items() if one.plural))
    for role, one in ROLES.items():
        yield f"### `{role}`: {one.decides}\n"
        rows = []
        for choice, method in methods(role).items():
            lines = [
                f"`{name}`{_default(option)}: {option.doc}{_range(option)}" for name, option in method.options.items()
            ]
            rows.append((f"`{choice}`", method.summary, "<br>".join(lines) or "none"))
        yield from table(("choice", "what it does", "options"), rows)


def _default(option: Any) -> str:
    return "" if option.default == "" else f" = {option.default}"


def _range(option: Any) -> str:
    if option.choices:
        return f" ({', '.join(f'`{choice}`' for choice in option.choices)})"
    if isinstance(option.default, str):
        return ""
    most = f" to {option.most:g}" if option.most < float("inf") else " upwards"
    return f" ({option.least:g}{most})"


def _shipped() -> Iterator[str]:
    yield "## What ships\n"
    rows = [
        (kind, name, _first_line(profiles_folder() / kind / f"{name}.yaml"))
        for kind in ("runs", "recipes", "devices")
        for name in shipped(kind)
    ]
    yield from table(("kind", "name", "what it is"), rows)


def _first_line(file: Path) -> str:
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            return line.removeprefix("#").strip()
        if line.startswith(("summary:", "description:")):
            return line.partition(":")[2].strip().strip('"')
    return ""


def _sizes() -> Iterator[str]:
    yield "## Encoder sizes\n"
    yield "`edgefl plan --sizes` lists them too. A field given beside `size` wins.\n"
    rows = [
        (kind, f"`{size}`", ", ".join(f"{name} {as_yaml(value)}" for name, value in fields.items()))
        for kind, own in OWN.items()
        for size, fields in own.sizes.items()
    ]
    yield from table(("kind", "size", "fields"), rows)

"""Files of a declared model: first weights by part, of a model that only its owner's code can build.

safetensors; a tensor is called ``<part>|<name>``, and the metadata name the parts in order. The coordinator reads the
file without the code: it is all that it knows of the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.errors import ModelError
from edgefl.models.spec import LAYERS, MISSING, PROTOTYPES, SIGNATURE, DeclaredSpec
from edgefl.storage.disk import store_errors, write_new

if TYPE_CHECKING:  # the files are read where tensors are; help and plans need none
    import numpy as np

_FORMAT = "edgefl-declared/1"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
#: Names that mean something else in a model of EdgeFL's own, or travel beside the model.
_RESERVED = frozenset({"fusion", "task", MISSING, PROTOTYPES, SIGNATURE, LAYERS})
#: Each part is a message's entry in every offer; the models of EdgeFL's own have about 60.
MAX_PARTS = 200
#: Endings of torch's names of batch norm's statistics.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_SAVE = "Write the file with edgefl.client.save(model, parts, path)."


def check_names(names: tuple[str, ...]) -> None:
    """Raise ModelError for no part, too many, or a name that cannot be a part's."""
    if not 0 < len(names) <= MAX_PARTS:
        raise ModelError(f"{len(names)} parts are declared", remedy=f"Declare between 1 and {MAX_PARTS}.")
    for name in names:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            rule = "letters, digits, _, . and -, beginning with a letter, at most 64"
            remedy = f"Use {rule}, and none of {', '.join(sorted(_RESERVED))}."
            raise ModelError(f"{name[:80]!r} cannot be a part's name", remedy=remedy)


def write_declared(path: Path, parts: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write the parts to ``path``, whole or not at all. Raises ModelError, StoreError."""
    from safetensors.numpy import save

    check_names(tuple(parts))
    tensors = {f"{part}|{name}": value for part, named in parts.items() for name, value in named.items()}
    data = save(tensors, metadata={"format": _FORMAT, "parts": json.dumps(list(parts))})
    with store_errors("write", path, len(data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, data)


def declared_spec(path: Path) -> DeclaredSpec:
    """The parts that a file declares; no tensor is read. Raises ModelError."""
    return DeclaredSpec(tuple(_parts(path)), str(path.absolute()))


def declared_tensors(spec: DeclaredSpec) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Each part with its first tensors, one part in memory at a time. Raises ModelError for another or no such file."""
    from safetensors import safe_open

    path = Path(spec.initial)
    parts = _parts(path)
    if tuple(parts) != spec.parts:
        text = f"{path} has the parts {', '.join(parts)}, and the run was planned with {', '.join(spec.parts)}"
        raise ModelError(text, remedy="Put the run's own file back, or start another run.")
    with safe_open(path, framework="numpy") as file:
        for part, names in parts.items():
            yield part, {name: file.get_tensor(f"{part}|{name}") for name in names}


def statistics_of(spec: DeclaredSpec) -> str:
    """The first of batch norm's statistics in the file; "" for none."""
    names = (f"{part}: {name}" for part, tensors in _parts(Path(spec.initial)).items() for name in tensors)
    return next((name for name in names if name.endswith(_STATISTICS)), "")


def _parts(path: Path) -> dict[str, list[str]]:
    """Part -> names of its tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
        names = json.loads(metadata.get("parts", "null"))
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error)[:200]}", remedy=_SAVE) from error
    if metadata.get("format") != _FORMAT or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ModelError(f"{path} declares no parts", remedy=_SAVE)
    check_names(tuple(names))
    found: dict[str, list[str]] = {name: [] for name in names}
    for key in sorted(keys):
        part, _, name = key.partition("|")
        if not name or part not in found:
            raise ModelError(f"{path}: the tensor {key[:80]!r} is of no declared part", remedy=_SAVE)
        found[part].append(name)
    if empty := [part for part, tensors in found.items() if not tensors]:
        raise ModelError(f"{path}: the part {empty[0]!r} has no tensor", remedy=_SAVE)
    return found

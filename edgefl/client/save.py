"""Files of a declared model: first weights for a run, trained ones back into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from edgefl.client.tensors import as_array, fill, named_tensors
from edgefl.errors import ModelError
from edgefl.models.declared import declared_spec, declared_tensors, write_declared


def save(model: nn.Module, parts: Mapping[str, Sequence[str]], path: str | Path) -> dict[str, int]:
    """Write the model's weights for a run file's ``model: {own: PATH}``; part -> bytes.

    ``parts``: name -> beginnings of names in ``model.state_dict()``, in the order in which stages train them; the last
    is the head. "conv" stands for conv and conv.weight, not for conv1; the longest that fits wins, "" fits the rest.
    Raises ModelError for a tensor of no part and a part of no tensor; StoreError when the disk refuses.
    """
    prefixes = {
        prefix: part for part, named in parts.items() for prefix in ([named] if isinstance(named, str) else named)
    }
    found: dict[str, dict[str, np.ndarray]] = {part: {} for part in parts}
    tensors = named_tensors(model)
    for name, tensor in tensors.items():
        fits = [prefix for prefix in prefixes if not prefix or name == prefix or name.startswith(f"{prefix}.")]
        if not fits:
            children = ", ".join(dict.fromkeys(name.partition(".")[0] for name in tensors))
            remedy = f'Name its beginning in a part, or "" for all the rest; the model has: {children[:300]}.'
            raise ModelError(f"the model's {name!r} is in no declared part", remedy=remedy)
        found[prefixes[max(fits, key=len)]][name] = as_array(tensor)
    if empty := [part for part, named in found.items() if not named]:
        remedy = "Take the part out, or name beginnings as model.state_dict() has them."
        raise ModelError(f"the part {empty[0]!r} ({list(parts[empty[0]])}) has no tensor", remedy=remedy)
    write_declared(Path(path), found)
    return {part: sum(array.nbytes for array in named.values()) for part, named in found.items()}


def load(model: nn.Module, path: str | Path) -> None:
    """Copy the weights in a file of ``save``, or of `edgefl export RUN --to safetensors`, into ``model``.

    Raises ModelError for a file of another model, and changes nothing then.
    """
    fill(model, dict(declared_tensors(declared_spec(Path(path)))))

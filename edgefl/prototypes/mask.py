"""The prototype mask at inference: stand-ins for absent modalities from the one that is there.

match the projection r_m to classes with m's own table, then mix the other modality's prototypes of those classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.prototypes.library import Array, ClassMeans
from edgefl.prototypes.matching import match, mix

#: Classes mixed and softmax temperature over cosines, in training, evaluation and exported bundles alike. So sharp that
#: only near ties are mixed: an even mixture of classes is what zeros already say (docs/decisions/0005).
TOP_K = 3
TEMPERATURE = 0.01


def prototype_mask(h: Array, own: ClassMeans, other: ClassMeans) -> Array:
    """Stand-ins [B, d'] of the other modality for projections ``h`` [B, d]; zeros when no class has both tables."""
    among = own.present & other.present
    if not among.any():
        return np.zeros((len(h), other.means.shape[1]), np.float32)
    index, weights = match(h, own, "cosine", TOP_K, TEMPERATURE, among)
    return mix(index, weights, other)


def masked(
    projections: Mapping[str, Array], wanted: list[str], tables: Mapping[str, ClassMeans], kind: str, width: int
) -> dict[str, Array]:
    """``projections`` ([B, d] each, at least one) with every other modality of ``wanted`` filled in.

    ``kind``: "zero" or "prototype". With several modalities at hand, the first that has a table speaks.
    """
    batch = len(next(iter(projections.values())))
    filled = dict(projections)
    source = next((m for m in projections if m in tables), None)
    for modality in wanted:
        if modality in filled:
            continue
        if kind == "prototype" and source is not None and modality in tables:
            filled[modality] = prototype_mask(projections[source], tables[source], tables[modality])
        else:
            filled[modality] = np.zeros((batch, width), np.float32)
    return filled

"""Poverty substitution: the tensor that missing modalities changed most comes from devices with complete data.

MMiC, arXiv 2505.06911, equation 11:  theta_k[p] = sum_j w_j theta_j[p] / sum_j w_j  over the devices j of k's cluster
that took part with complete data, p = k's poverty layer.
Planned first, for the record; then computed from the uploads as they came, of which none is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from edgefl.aggregation.combine import MisfitError, Tensor, Tensors, WeightedMean
from edgefl.errors import ModelError


class Substitution(NamedTuple):
    """One tensor of a part, and the devices, sorted, whose mean takes its place."""

    part: str
    tensor: str
    donors: tuple[str, ...]


def plan_substitution(
    poverty: Mapping[str, tuple[str, str]],
    complete: Collection[str],
    clusters: Mapping[str, int],
    holders: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Substitution | str]:
    """device -> what replaces its poverty tensor, or the reason why nothing does; one entry per key of ``poverty``.

    ``poverty``: device -> (part, tensor); ``complete``: the devices of this round that trained with complete data,
    which need no repair themselves; ``clusters``: device -> cluster; ``holders``: part -> the devices that trained it
    on samples (None: everyone trained everything).
    """
    return {
        device: _plan(device, part, tensor, complete, clusters, None if holders is None else holders.get(part, ()))
        for device, (part, tensor) in sorted(poverty.items())
    }


def _plan(
    device: str,
    part: str,
    tensor: str,
    complete: Collection[str],
    clusters: Mapping[str, int],
    holders: Collection[str] | None,
) -> Substitution | str:
    if device in complete:
        return "it trained with complete data and needs no repair"
    if device not in clusters:
        return "it belongs to no cluster"
    if holders is not None and device not in holders:
        return f"it did not train part '{part}'"
    near = [donor for donor in complete if donor in clusters and clusters[donor] == clusters[device]]
    if not near:
        return f"no device of cluster {clusters[device]} trained with complete data"
    donors = tuple(sorted(donor for donor in near if holders is None or donor in holders))
    if not donors:
        return f"no device of cluster {clusters[device]} with complete data trained part '{part}'"
    return Substitution(part, tensor, donors)


def substitute(
    load: Callable[[str, str], Tensors], plan: Mapping[str, Substitution | str], weights: Mapping[str, float]
) -> dict[str, tuple[str, str, Tensor]]:
    """device -> (part, name, the f32 tensor to put there), for every substitution of ``plan``.

    ``load``: (device, part) -> its tensors as uploaded; one donor's are in memory at a time. ``weights``: device ->
    weight, renormalised over the donors; those without weight are passed over. Devices with the same substitution
    share one array. Raises MisfitError, naming the donor, for a tensor that is missing, misshapen or not finite, and
    ModelError when no donor has weight.
    """
    means: dict[Substitution, Tensor] = {}
    replaced = {}
    for device, wanted in sorted(plan.items()):
        if isinstance(wanted, str):
            continue
        if wanted not in means:
            means[wanted] = _mean(load, wanted, weights)
        replaced[device] = (wanted.part, wanted.tensor, means[wanted])
    return replaced


def _mean(load: Callable[[str, str], Tensors], wanted: Substitution, weights: Mapping[str, float]) -> Tensor:
    part, name, donors = wanted
    weighty = [donor for donor in donors if weights.get(donor, 0.0) > 0]
    if not weighty:
        raise ModelError(
            f"the donors of '{name}' in part '{part}' have no weight: {', '.join(donors)}",
            remedy="Name as holders only devices that trained the part on samples.",
        )
    mean = WeightedMean()
    for donor in weighty:
        tensors = load(donor, part)
        if name not in tensors:
            raise MisfitError("names", f"donor '{donor}' lacks tensor '{name}' of part '{part}'")
        try:
            mean.add(weights[donor], {name: np.asarray(tensors[name])})
        except MisfitError as error:
            raise MisfitError(error.reason, f"donor '{donor}', part '{part}': {error.message}") from error
    return mean.result()[name]

"""Poverty substitution: the tensor that missing modalities changed most comes from devices with complete data.

MMiC, arXiv 2505.06911, equation 11:  theta_k[p] = sum_j w_j theta_j[p] / sum_j w_j  over the devices j of k's cluster
in the round without a poverty layer (none of their batches lacked modalities after a complete one), p = k's.
Where no device of the round is such, by section 4.1's "parameters that are less impacted ... substitute those that are
more significantly affected": over those whose largest change (equation 10) is below k's, and so their change of p.
Planned first, for the record; then computed from the uploads as they came, of which none is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from edgefl.aggregation.mean import MisfitError, Tensor, Tensors, WeightedMean
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
    changes: Mapping[str, float] | None = None,
) -> dict[str, Substitution | str]:
    """device -> what replaces its poverty tensor, or the reason why nothing does; one entry per key of ``poverty``.

    ``poverty``: device -> (part, tensor); ``complete``: the devices of this round that trained with complete data,
    which need no repair themselves; ``clusters``: device -> cluster; ``holders``: part -> the devices that trained it
    on samples (None: everyone trained everything); ``changes``: device -> the largest change of a layer, where less
    affected devices may lend if none is complete (None: only complete ones). A change of 0 or less is not known.
    """
    return {
        device: _plan(device, *layer, complete, clusters, holders, changes) for device, layer in sorted(poverty.items())
    }


def _plan(
    device: str,
    part: str,
    tensor: str,
    complete: Collection[str],
    clusters: Mapping[str, int],
    holders: Mapping[str, Collection[str]] | None,
    changes: Mapping[str, float] | None,
) -> Substitution | str:
    trained = None if holders is None else holders.get(part, ())
    if device in complete:
        return "it trained with complete data and needs no repair"
    if device not in clusters:
        return "it belongs to no cluster"
    if trained is not None and device not in trained:
        return "it did not train the layer's part"
    near = [d for d in clusters if d != device and clusters[d] == clusters[device] and (not trained or d in trained)]
    if not near:
        return "no other device of its cluster trained the layer's part"
    donors = [donor for donor in near if donor in complete]
    if complete or changes is None:
        return (
            Substitution(part, tensor, tuple(sorted(donors)))
            if donors
            else "no device of its cluster had complete data"
        )
    donors = [donor for donor in near if 0 < changes.get(donor, 0.0) < changes.get(device, 0.0)]
    if donors:
        return Substitution(part, tensor, tuple(sorted(donors)))
    return "no device of its cluster had complete data or was less affected"


def unlikely(samples: Mapping[str, Mapping[str, int]], modalities: Collection[str], donors: str) -> str:
    """Why no layer can be replaced, or hardly any, among devices with these samples; "": some can.

    ``samples``: device -> modality -> samples that have it, "" -> all; ``donors``: the option of repair: poverty.
    """
    counts = {device: ([told.get(m, 0) for m in modalities], told.get("", 0)) for device, told in samples.items()}
    whole = {device for device, (held, total) in counts.items() if all(n == total for n in held)}
    both = {device for device, (held, _) in counts.items() if device not in whole and all(held)}
    if not both and whole == counts.keys():
        return "no device has samples that lack a modality: there is no poverty layer to replace"
    if not both:
        return "no device has both complete samples and others, between which a poverty layer shows"
    if len(counts) == 1:
        return "one device alone has no donors"
    if donors == "complete" and not whole:
        return (
            "every device has samples that lack a modality, and a donor trains none in its round; "
            "set repair: {poverty: {donors: less_affected}}, or expect few substitutions"
        )
    return ""


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

"""Poverty substitution: the tensor that missing modalities changed most comes from devices with complete data.

MMiC, arXiv 2505.06911, equation 11:  theta_k[p] = sum_j w_j theta_j[p] / sum_j w_j  over the devices j of k's cluster
in the round without a poverty layer (none of their batches lacked modalities after a complete one), p = k's.
Where no device of the round is such, by section 4.1's "parameters that are less impacted ... substitute those that are
more significantly affected": over those whose largest change (equation 10) is below k's, and so their change of p.
The authors' code takes every member of the cluster whose own poverty layer is another one or none, also those that did
not train in the round, which hold the model that they were sent; here only members that trained once, whatever their
layer was then (there: by the layer of their last round).
Planned first, for the record; then computed from the uploads as they came, of which none is changed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edgefl.aggregation.history import UpdateInfo, grouped
from edgefl.aggregation.mean import MisfitError, Tensor, Tensors, WeightedMean
from edgefl.aggregation.server_state import shared, view
from edgefl.errors import ModelError
from edgefl.methods.mmic.poverty_layer import weight_tensors
from edgefl.models.spec import is_scheduled
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore

#: (device, part) -> tensors in place of its own.
Mended = dict[tuple[str, str], Tensors]


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
    absent: Collection[str] | None = None,
) -> dict[str, Substitution | str]:
    """device -> what replaces its poverty tensor, or the reason why nothing does; one entry per key of ``poverty``.

    ``poverty``: device -> (part, tensor); ``complete``: the devices of this round that trained with complete data,
    which need no repair themselves; ``clusters``: device -> cluster; ``holders``: part -> the devices that trained it
    on samples (None: everyone trained everything); ``changes``: device -> the largest change of a layer, where less
    affected devices may lend if none is complete (None: only complete ones). A change of 0 or less is not known.
    ``absent``: members of clusters that did not train and lend the layer as it was sent, beside everyone with another
    poverty layer or none (None: only those lend that trained, as above).
    """
    plan: dict[str, Substitution | str] = {}
    for device, (part, tensor) in sorted(poverty.items()):
        trained = None if holders is None else holders.get(part, ())
        if absent is None:
            donors = _donors(device, complete, clusters, trained, changes)
        else:
            donors = _spared(device, poverty, clusters, trained, absent)
        plan[device] = donors if isinstance(donors, str) else Substitution(part, tensor, donors)
    return plan


def _donors(
    device: str,
    complete: Collection[str],
    clusters: Mapping[str, int],
    trained: Collection[str] | None,
    changes: Mapping[str, float] | None,
) -> tuple[str, ...] | str:
    """The donors that lend ``device`` a layer that ``trained`` have trained, or the reason why none does."""
    if device in complete:
        return "it trained with complete data and needs no repair"
    near = _near(device, clusters, trained)
    if isinstance(near, str):
        return near
    donors = [donor for donor in near if donor in complete]
    if complete or changes is None:
        return tuple(sorted(donors)) or "no device of its cluster had complete data"
    donors = [donor for donor in near if 0 < changes.get(donor, 0.0) < changes.get(device, 0.0)]
    return tuple(sorted(donors)) or "no device of its cluster had complete data or was less affected"


def _spared(
    device: str,
    poverty: Mapping[str, tuple[str, str]],
    clusters: Mapping[str, int],
    trained: Collection[str] | None,
    absent: Collection[str],
) -> tuple[str, ...] | str:
    """The donors of ``device``: all of its cluster with another poverty layer or none; or why there are none."""
    near = _near(device, clusters, trained, absent)
    if isinstance(near, str):
        return near
    donors = [donor for donor in near if poverty.get(donor) != poverty[device]]
    return tuple(sorted(donors)) or "all others of its cluster have the same poverty layer"


def _near(
    device: str, clusters: Mapping[str, int], trained: Collection[str] | None, absent: Collection[str] = ()
) -> list[str] | str:
    """The others of the cluster that hold the layer, by training or as it was sent; or why there are none."""
    if device not in clusters:
        return "it belongs to no cluster"
    if trained is not None and device not in trained:
        return "it did not train the layer's part"
    near = [d for d in clusters if d != device and clusters[d] == clusters[device]]
    return [d for d in near if not trained or d in trained or d in absent] or (
        "no other device of its cluster trained the layer's part"
    )


def unlikely(samples: Mapping[str, Mapping[str, int]], modalities: Collection[str], donors: str) -> str:
    """Why no layer can be replaced, or hardly any, among devices with these samples; "": some can.

    ``samples``: device -> modality -> samples that have it, "" -> all; ``donors``: the option of repair: poverty.
    """
    counts = {device: ([own.get(m, 0) for m in modalities], own.get("", 0)) for device, own in samples.items()}
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
    """Replacement for each device's poverty layer: its donors' weighted mean.

    device -> (part, tensor name, f32 tensor); devices with a reason (str) in ``plan`` are skipped. ``load``: (device,
    part) -> its tensors as uploaded; at most two donors' are in memory. ``weights``: device ->
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


def mend(
    updates: Sequence[UpdateInfo],
    state: Manifest,
    store: ObjectStore,
    clusters: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    donors: str,
) -> tuple[Mended, Mapping[str, object]]:
    """Substitution of each device's poverty layer by its donors' mean.

    Arguments and result are those of ``roles.Repair.mend``. ``donors``: "cluster", "less_affected", or else only the
    devices that trained with complete data.
    """
    by_device = {u.device: u for u in updates}

    def tensors(device: str, part: str) -> Tensors:
        sent = by_device[device].manifest if device in by_device else view(state, device, clusters.get(device, -1))
        return decode_part(store.read(sent[part].id), copy=False)

    poorest, plan = _poorest(updates, shared(state), store)
    complete = {u.device for u in updates if u.complete}
    parts = {part for u in updates for part in u.manifest}
    holders = {p: {u.device for u in updates if p in u.manifest and u.samples.get(p, 0) > 0} for p in parts}
    changes = {u.device: u.poverty_change for u in updates if u.poverty >= 0}
    less = changes if donors == "less_affected" else None
    if donors == "cluster":
        near = clusters or dict.fromkeys([*by_device, *weights], 0)
        absent = {d for d in near if d not in by_device and weights.get(d, 0) > 0}
        plan |= plan_substitution(poorest, complete, near, holders, absent=absent)
    else:
        plan |= plan_substitution(poorest, complete, grouped(updates, clusters), holders, less)
    found = substitute(tensors, plan, weights)
    mended: Mended = {(device, part): {tensor: value} for device, (part, tensor, value) in found.items()}
    record = {
        d: {"kept": one} if isinstance(one, str) else {**one._asdict(), "donors": list(one.donors)}
        for d, one in sorted(plan.items())
    }
    return mended, record


def _poorest(
    updates: Sequence[UpdateInfo], model: Manifest, store: ObjectStore
) -> tuple[dict[str, tuple[str, str]], dict[str, Substitution | str]]:
    """device -> (part, tensor) of its poverty layer; and why the other devices without complete data have none."""
    poorest: dict[str, tuple[str, str]] = {}
    none: dict[str, Substitution | str] = {}
    for update in (u for u in updates if not u.complete):
        trained = [part for part in update.manifest if part in model and is_scheduled(part)]
        layers = weight_tensors({part: decode_part(store.read(model[part].id), copy=False) for part in trained})
        if 0 <= update.poverty < len(layers):
            poorest[update.device] = layers[update.poverty]
        elif update.poverty < 0:
            none[update.device] = "no batch that lacks modalities came after a complete one"
        else:
            none[update.device] = "it names a layer that it did not train"
    return poorest, none

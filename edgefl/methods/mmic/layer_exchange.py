"""One-layer exchange: in the rounds between two whole exchanges, poverty layers alone travel.

MMiC (arXiv 2505.06911) repairs one layer of a device by equation 11 after whole uploads; here that layer is all that is
uploaded, and each device trains on from the one it is lent:  theta_i[p] = sum_j w_j theta_j[p] / sum_j w_j  over the
donors j of i's cluster, p = i's poverty layer by its last update. Without a donor the mean is over all of the cluster
that sent p, i among them, if they are two or more (docs/decisions/0060).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from edgefl.aggregation.history import UpdateInfo, grouped
from edgefl.aggregation.mean import Tensors
from edgefl.methods.mmic.poverty_substitution import Substitution, plan_substitution, substitute
from edgefl.models.spec import LAYERS
from edgefl.plan.periods import in_parts, split
from edgefl.protocol.tensors import decode_part
from edgefl.registry import Member
from edgefl.storage.objects import ObjectStore

#: Devices that a layer is asked of, at least: a mean of one is what that device has.
LEAST = 2


def ask(members: Mapping[str, Member], *, layers: float) -> dict[str, tuple[str, ...]]:
    """device -> the layers it is to upload: of its cluster's poverty layers those that changed most.

    At most ``layers`` in a cluster, each trained by two of its members or more. In a stage's first round, where no
    poverty layer is known, the largest that may be exchanged, since it is most of the model.
    """
    found: dict[str, tuple[str, ...]] = {}
    for cluster in sorted({member.cluster for member in members.values()}):
        own = {device: member for device, member in sorted(members.items()) if member.cluster == cluster}
        changes = _largest(own, {m.layer: m.change for m in sorted(own.values(), key=lambda m: m.change) if m.layer})
        wanted = changes or _largest(own, dict.fromkeys((m.largest for m in own.values() if m.largest), 0.0))
        chosen = wanted[: int(layers)]
        found |= {d: tuple(name for name in chosen if split(name)[0] in m.parts) for d, m in own.items()}
    return found


def _largest(members: Mapping[str, Member], changes: Mapping[str, float]) -> list[str]:
    """The layers that enough members train, the most changed first, of equals the last by name."""
    shared = [name for name in changes if sum(split(name)[0] in m.parts for m in members.values()) >= LEAST]
    return sorted(sorted(shared, reverse=True), key=lambda name: -changes[name])


def lend(
    updates: Sequence[UpdateInfo],
    needs: Mapping[str, str],
    store: ObjectStore,
    clusters: Mapping[str, int],
    *,
    donors: str,
) -> tuple[dict[str, Tensors], dict[str, object]]:
    """Replacement layers of the devices (equation 11), and the record of each device's substitution.

    ``needs``: device -> its poverty layer by the update before. A device that found its first one in this round needs
    the first of the layers that it sent; one that has none, as with samples of one modality alone, needs none.
    """
    uploads = {u.device: decode_part(store.read(u.manifest[LAYERS].id)) for u in updates if LAYERS in u.manifest}
    trained = {u.device: [part for part, count in u.samples.items() if count > 0] for u in updates}
    uploads = {d: {layer: own[layer] for layer in in_parts(own, trained[d])} for d, own in uploads.items()}
    senders = {layer: [d for d in sorted(uploads) if layer in uploads[d]] for own in uploads.values() for layer in own}
    sent_first = {u.device: min(uploads.get(u.device, {}), default="") for u in updates if u.layer}
    wanted = {u.device: needs.get(u.device) or sent_first.get(u.device, "") for u in updates}
    groups, weights = grouped(updates, clusters), {u.device: u.weight for u in updates}
    values: dict[str, Tensors] = {}
    record: dict[str, object] = {u.device: {"kept": _unserved(u, wanted[u.device])} for u in updates}
    for layer, names in sorted(senders.items()):
        part, tensor = split(layer)
        poorest = {u.device: u.layer == layer for u in updates if not u.complete and wanted[u.device] == layer}
        plan: dict[str, Substitution | str] = {}
        for still in (True, False):
            own = {d: (part, tensor) for d, same in poorest.items() if d in names and same is still}
            plan |= _plan(own, updates, groups, {part: names}, donors, still=still)

        def sent(device: str, _: str, layer: str = layer, tensor: str = tensor) -> Tensors:
            return {tensor: uploads[device][layer]}

        values |= {device: {layer: value} for device, (_, _, value) in substitute(sent, plan, weights).items()}
        record |= {
            device: {"kept": one} if isinstance(one, str) else {**one._asdict(), "donors": list(one.donors)}
            for device, one in plan.items()
        }
    return values, dict(sorted(record.items()))


def _plan(
    poorest: Mapping[str, tuple[str, str]],
    updates: Sequence[UpdateInfo],
    groups: Mapping[str, int],
    holders: Mapping[str, Collection[str]],
    donors: str,
    *,
    still: bool,
) -> dict[str, Substitution | str]:
    """Device -> its substitution: the donors' mean, else its cluster's; or the reason for none.

    ``still``: whether the layer is also the devices' poverty layer by this update. Only then are others, whose largest
    change is below theirs, less affected in it.
    """
    complete = {u.device for u in updates if u.complete}
    less = still and donors == "less_affected"
    changes = {u.device: u.poverty_change for u in updates if u.layer} if less else None
    absent = () if donors == "cluster" else None  # who is not in the period holds what it began with, and lends nothing
    plan = plan_substitution(poorest, complete, groups, holders, changes, absent)
    for device, one in plan.items():
        if isinstance(one, str) and device in groups:
            part, tensor = poorest[device]
            near = tuple(d for d in holders[part] if groups.get(d) == groups[device])
            plan[device] = Substitution(part, tensor, near) if len(near) >= LEAST else one
    return plan


def _unserved(update: UpdateInfo, wanted: str) -> str:
    """Reason that a device keeps its own layer, where no other was sent."""
    if update.complete:
        return "it trained with complete data and needs no repair"
    if not update.layer and not wanted:
        return "no batch that lacks modalities came after a complete one"
    return f"its poverty layer {wanted} was not asked for" if wanted else "it was asked for no layer"

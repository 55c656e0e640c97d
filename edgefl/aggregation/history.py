"""Server history of the devices between rounds: metrics, their changes, and which were core devices.

MMiC, arXiv 2505.06911, equations 14 to 17:  alpha_i,t = a_i,t - a_i,t-1;  A_S = sum_i w_i alpha_i / sum_i w_i over i in
S;  i is core when A_S >= alpha* and A_{S without i} < alpha*;  phi_i += 1 when i is core in round t. a is a device's
metric after local training, higher is better. Coalitions are clusters': alpha*_m of cluster m is the weighted mean,
over its devices of the round, of the change of the metric that each measured on the model it was sent. Like alpha_i it
reaches back to the last time that a device reported, so that both are of the same devices and spans. Before it ever
trained, a device's model a_i,t-1 is the one it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from edgefl.aggregation.mean import Tensors
from edgefl.aggregation.pace import StageTrack
from edgefl.aggregation.server_state import SERVER, of_device
from edgefl.errors import ModelError
from edgefl.models.spec import is_matcher, modality_of
from edgefl.plan.choice_of_k import Counts, counts_of
from edgefl.records import Manifest
from edgefl.registry import Choice
from edgefl.storage.objects import ObjectStore

#: Metrics lie around 1, so a round's weighted mean is exact to 1e-15: within this, two returns are the same.
_SAME = 1e-12


def coalition_return(weights: Mapping[str, float], returns: Mapping[str, float]) -> float:
    """A_S of the devices in ``returns``, their weights renormalised. Raises ModelError when they weigh nothing."""
    members = sorted(returns)  # so that not even the last bit depends on who reported first
    total = sum(weights[device] for device in members)
    if not total > 0:
        raise ModelError(
            f"the devices {', '.join(members) or '(none)'} weigh nothing together",
            remedy="Leave devices without samples out of a coalition.",
        )
    return sum(weights[device] * returns[device] for device in members) / total


def core_members(weights: Mapping[str, float], returns: Mapping[str, float], gain: float) -> set[str]:
    """The devices without which the coalition's return falls below ``gain`` (alpha*), when it reaches it.

    A device alone is core when its return reaches the gain. Devices without weight are never core.
    """
    members = {device: value for device, value in returns.items() if weights[device] > 0}
    if not members or coalition_return(weights, members) < gain - _SAME:
        return set()
    core = set()
    for device in members:
        others = {name: value for name, value in members.items() if name != device}
        if not others or coalition_return(weights, others) < gain - _SAME:
            core.add(device)
    return core


#: The cluster of a device that belongs to none, or to none yet.
NO_CLUSTER = -1
#: Returns kept of a device. At 16 bytes or so each in JSON, 50 devices come to 0.2 MB, read and written every round.
RETURNS_KEPT = 200


class Track(msgspec.Struct, frozen=True):
    """History of one device. ``returns``: round (from 1) -> change of its metric since it last reported.

    The first: since it was sent the model.
    """

    metric: float | None = None  # after local training; None: it never reported one
    received: float | None = None  # of the model it was sent; None: it never reported one
    returns: dict[int, float] = {}
    core: int = 0  # rounds in which it was core
    selected: int = 0  # rounds in which it took part
    weight: float = 0.0  # in its last round
    cluster: int = NO_CLUSTER
    layer: str = ""  # its layer to repair that may be exchanged alone ("part|tensor"), by its last update; "": none
    change: float = 0.0  # how much missing modalities changed that


class PeriodMember(msgspec.Struct, frozen=True):
    """A device of the period that is under way, after a round of it.

    ``base``: the digest of what it retains and goes on from; ``lent``: the id of the layers it is sent, "" for none;
    ``received``: its metric of the model that the period began with, which its return is measured against.
    """

    base: str = ""
    lent: str = ""
    received: float | None = None


class Memory(msgspec.Struct, frozen=True):
    """Aggregation's memory after ``rounds`` rounds. ``gains``: cluster -> alpha* of the last round, where it is known.

    ``networks``: once the last round has trained them, "match/<m>" -> the keys of the state that hold its ensemble,
    with their weights. ``stage``: the stage under way, where its pace judges it. ``spent``: of the account of privacy;
    ``over``: it takes no other round. ``uploads``: the most that a device has sent, where the server is not trusted.
    """

    rounds: int = 0
    gains: dict[int, float] = {}
    devices: dict[str, Track] = {}
    networks: dict[str, dict[str, float]] = {}
    period: dict[str, PeriodMember] = {}  # of the period under way: empty after its last round
    k: int | msgspec.UnsetType = msgspec.UNSET  # ProtoMix's, as last chosen on hold-outs
    stage: StageTrack = StageTrack()
    spent: float | msgspec.UnsetType = msgspec.UNSET
    over: bool | msgspec.UnsetType = msgspec.UNSET
    uploads: int | msgspec.UnsetType = msgspec.UNSET
    combine: dict[str, float] | msgspec.UnsetType = msgspec.UNSET  # options of the slot that the last round has set

    def ended(self, stage: int) -> bool:
        """True for a stage that is over before its last planned round."""
        return bool(self.over) or (self.stage.over and self.stage.index == stage)


def note_round(
    memory: Memory,
    metrics: Mapping[str, float],
    received: Mapping[str, float],
    weights: Mapping[str, float],
    clusters: Mapping[str, int] | None = None,
) -> Memory:
    """The memory after one more round, whose participants are the keys of ``weights`` (any scale, 0 or more).

    ``metrics``: a participant's metric after local training; ``received``: that of the model it was sent. Either may
    lack devices that measured nothing: they get no return this round. The first return of a device is its gain on the
    model it was sent, over which alpha* has no change. No device of a cluster is core in a round without its alpha*.
    ``clusters``: device -> cluster, of all devices that have one; those without are one group. Raises ModelError,
    naming the device, for a metric of a device that took no part and for a metric or weight that is not finite.
    """
    _check(metrics, received, weights)
    now, clusters = memory.rounds + 1, clusters or {}
    old = {device: memory.devices.get(device, Track()) for device in sorted(weights)}
    earlier = {d: received.get(d) if track.metric is None else track.metric for d, track in old.items()}
    sent = {d: received.get(d) if track.metric is None else track.received for d, track in old.items()}
    returns = {d: metrics[d] - before for d, before in earlier.items() if d in metrics and before is not None}
    changes = {d: received[d] - before for d, before in sent.items() if d in received and before is not None}
    gains, core = _coalitions(weights, returns, changes, clusters)
    devices = dict(memory.devices)
    for device, track in old.items():
        kept = {**track.returns, now: returns[device]} if device in returns else track.returns
        devices[device] = msgspec.structs.replace(
            track,
            metric=metrics.get(device, track.metric),
            received=received.get(device, track.received),
            returns=dict(sorted(kept.items())[-RETURNS_KEPT:]),
            core=track.core + (device in core),
            selected=track.selected + 1,
            weight=weights[device],
        )
    if clusters:  # also of devices that have not trained yet
        devices |= {d: Track() for d in sorted(clusters) if d not in devices}
        devices = {d: msgspec.structs.replace(t, cluster=clusters.get(d, NO_CLUSTER)) for d, t in devices.items()}
    return msgspec.structs.replace(memory, rounds=now, gains=gains, devices=devices, period={})


def _coalitions(
    weights: Mapping[str, float],
    returns: Mapping[str, float],
    changes: Mapping[str, float],
    clusters: Mapping[str, int],
) -> tuple[dict[int, float], set[str]]:
    """alpha* of each cluster with devices in the round, where it is known, and the devices that are core."""
    members: dict[int, set[str]] = {}
    for device, weight in weights.items():
        if weight > 0:
            members.setdefault(clusters.get(device, NO_CLUSTER), set()).add(device)
    gains: dict[int, float] = {}
    core: set[str] = set()
    for cluster, devices in sorted(members.items()):
        if seen := {device: changes[device] for device in changes if device in devices}:
            gains[cluster] = coalition_return(weights, seen)
            own = {device: returns[device] for device in returns if device in devices}
            core |= core_members(weights, own, gains[cluster])
    return gains, core


def _check(metrics: Mapping[str, float], received: Mapping[str, float], weights: Mapping[str, float]) -> None:
    for what, values in (("metric", metrics), ("metric of the model it received", received), ("weight", weights)):
        for device, value in sorted(values.items()):
            if device not in weights:
                raise ModelError(
                    f"device '{device}' reports a {what}, but took no part in the round",
                    remedy="Give every participant a weight.",
                )
            if not math.isfinite(value) or (what == "weight" and value < 0):
                raise ModelError(
                    f"the {what} of device '{device}' is {value}",
                    remedy="Leave out a metric that could not be measured; a weight is 0 or more.",
                )


#: Where the state keeps the memory.
KEY = f"{SERVER}memory"
#: Metrics of an update: of the model as received and as trained, on the device's own held-out samples.
RECEIVED, TRAINED = "received_score", "trained_score"
#: Metric of an update: loss of the model as received, on the device's own held-out samples.
RECEIVED_LOSS = "received_loss"


#: A round's record as plain values (``edgefl.aggregation.aggregate`` names its fields).
Record = dict[str, Any]
#: The server's step: (state, previous, combined) -> (next, next state).
Step = Callable[[Tensors | None, Tensors, Tensors], tuple[Tensors, Tensors | None]]


class UpdateInfo(msgspec.Struct, frozen=True):
    """One device's finished update, all of whose objects are in the store. ``samples``: part -> samples trained on.

    ``complete``, ``poverty``, ``poverty_change``: as in an update; ``poverty`` counts ``weight_tensors``;
    ``staleness``: how many rounds ago the state was the newest that it was made from, the parts of which are ``base``.
    """

    device: str = ""
    manifest: Manifest = {}
    samples: dict[str, int] = {}
    metrics: dict[str, float] = {}
    complete: bool = True
    poverty: int = -1
    poverty_change: float = 0.0
    layer: str = ""  # as in an update, where it may be exchanged alone
    retained: str = ""  # the digest of what the device retains of this round
    staleness: int = 0
    base: Manifest = {}
    factor: float = 1.0  # what its change is damped by

    @property
    def name(self) -> str:
        """Unique name in a round; a stale update carries its staleness: "cam-07~2"."""
        return f"{self.device}~{self.staleness}" if self.staleness else self.device

    @property
    def weight(self) -> float:
        """Samples of the part that it trained on most."""
        return float(max(self.samples.values(), default=0))

    @property
    def modalities(self) -> int:
        """How many modalities it trained parts of."""
        return len({owner for part, count in self.samples.items() if count > 0 and (owner := modality_of(part))})


def load(store: ObjectStore, state: Manifest) -> Memory:
    """The memory in a state; a new one when there is none."""
    return msgspec.json.decode(store.read(state[KEY].id), type=Memory) if KEY in state else Memory()


def note(memory: Memory, updates: Sequence[UpdateInfo], clusters: Mapping[str, int]) -> Memory:
    """The memory after a round; of a device that brought two updates, by the newer one."""
    updates = list({u.device: u for u in sorted(updates, key=lambda one: -one.staleness)}.values())
    metrics = {u.device: u.metrics[TRAINED] for u in updates if TRAINED in u.metrics}
    received = {u.device: u.metrics[RECEIVED] for u in updates if RECEIVED in u.metrics}
    for device, member in memory.period.items():  # what it received in this round is its own model
        if device in received:
            del received[device]
            received |= {device: member.received} if member.received is not None else {}
    noted = note_round(memory, metrics, received, {u.device: u.weight for u in updates}, clusters)
    return note_layers(noted, updates)


def losses(updates: Sequence[UpdateInfo]) -> dict[str, float]:
    """device -> loss of the model it received, on its hold-out; without one, 1 - its score."""
    found = {u.device: u.metrics.get(RECEIVED_LOSS, 1.0 - u.metrics.get(RECEIVED, math.nan)) for u in updates}
    return {device: loss for device, loss in sorted(found.items()) if math.isfinite(loss)}


def counted(updates: Sequence[UpdateInfo]) -> dict[str, Counts]:
    """device -> its counts for the choice of k, of devices that have some; of two updates the newer one's."""
    newest = {u.device: counts_of(u.metrics) for u in sorted(updates, key=lambda one: -one.staleness)}
    return {device: counts for device, counts in sorted(newest.items()) if counts is not None}


def note_layers(memory: Memory, updates: Sequence[UpdateInfo]) -> Memory:
    """The memory with the layer to repair that each of these updates names."""
    tracks = {
        u.device: msgspec.structs.replace(
            memory.devices.get(u.device, Track()), layer=u.layer, change=u.poverty_change if u.layer else 0.0
        )
        for u in updates
    }
    return msgspec.structs.replace(memory, devices={**memory.devices, **tracks})


def networks(record: Record) -> dict[str, dict[str, float]]:
    """The small networks this round has made: "match/<m>" -> {key of the state: weight}."""
    found: dict[str, dict[str, float]] = {}
    for key, told in record["parts"].items():
        if not is_matcher(key):
            continue
        weights = {of_device(device) + key: share for device, share in told["devices"].items()}
        alone = {name: share for name, share in weights.items() if name in record["parts"]}
        found[key] = alone or {key: 1.0}
    return found


def server_step(
    slot: Choice,
    memory: Memory,
    updates: Sequence[UpdateInfo],
    clusters: Mapping[str, int],
    record: Record,
) -> Step:
    """The optimiser's step (state, previous, combined) -> (next, state), with this round's own options."""
    if slot.method.adjust is not None:
        weights = {u.device: u.weight for u in updates}
        total = sum(weights.values()) or 1.0
        participants = {u.device: NO_CLUSTER for u in updates} | grouped(updates, clusters)
        shares = {device: weight / total for device, weight in weights.items()}
        changed, told = slot.bind(slot.method.adjust)(memory, participants, shares)
        record |= told
        slot = slot._replace(options={**slot.options, **changed})
    return slot.bind(slot.method.step)


def grouped(updates: Sequence[UpdateInfo], clusters: Mapping[str, int]) -> dict[str, int]:
    """device -> cluster, without those that belong to none; where the recipe makes no clusters, all are one."""
    if not clusters:
        return {u.device: 0 for u in updates}
    return {u.device: clusters[u.device] for u in updates if u.device in clusters}

"""What the server remembers of the devices between rounds: metrics, their changes, and who decided a round.

MMiC, arXiv 2505.06911, equations 14 to 17:  alpha_i,t = a_i,t - a_i,t-1;  phi_i += 1 when i is core in round t.
a is a device's metric after local training, higher is better. Coalitions are clusters': alpha*_m of cluster m is the
weighted mean, over its devices of the round, of the change of the metric that each measured on the model it was sent.
Like alpha_i it reaches back to the last time that a device reported, so that both are of the same devices and spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edgefl.aggregation.coalition import coalition_return, core_members
from edgefl.errors import ModelError

#: The cluster of a device that belongs to none, or to none yet.
NO_CLUSTER = -1
#: Returns kept of a device. At 16 bytes or so each in JSON, 50 devices come to 0.2 MB, read and written every round.
RETURNS_KEPT = 200


class Track(msgspec.Struct, frozen=True):
    """What is known of one device. ``returns``: round (from 1) -> change of its metric since it last reported."""

    metric: float | None = None  # after local training; None: it never reported one
    received: float | None = None  # of the model it was sent; None: it never reported one
    returns: dict[int, float] = {}
    core: int = 0  # rounds in which it was core
    selected: int = 0  # rounds in which it took part
    weight: float = 0.0  # in its last round
    cluster: int = NO_CLUSTER


class Memory(msgspec.Struct, frozen=True):
    """Aggregation's memory after ``rounds`` rounds. ``gains``: cluster -> alpha* of the last round, where it is known.

    ``networks``: once the last round has trained them, "match/<m>" -> the keys of the state that hold its ensemble,
    with their weights.
    """

    rounds: int = 0
    gains: dict[int, float] = {}
    devices: dict[str, Track] = {}
    networks: dict[str, dict[str, float]] = {}


def note_round(
    memory: Memory,
    metrics: Mapping[str, float],
    received: Mapping[str, float],
    weights: Mapping[str, float],
    clusters: Mapping[str, int] | None = None,
) -> Memory:
    """The memory after one more round, whose participants are the keys of ``weights`` (any scale, 0 or more).

    ``metrics``: a participant's metric after local training; ``received``: that of the model it was sent. Either may
    lack devices that measured nothing: they get no return this round. A return needs an earlier metric. No device of
    a cluster is core in a round in which its alpha* is unknown. ``clusters``: device -> cluster, of all devices that
    have one; those without are one group. Raises ModelError, naming the device, for a metric of a device that took no
    part and for a metric or weight that is not a finite number.
    """
    _check(metrics, received, weights)
    now, clusters = memory.rounds + 1, clusters or {}
    old = {device: memory.devices.get(device, Track()) for device in sorted(weights)}
    returns = {d: metrics[d] - track.metric for d, track in old.items() if d in metrics and track.metric is not None}
    changes = {
        d: received[d] - track.received for d, track in old.items() if d in received and track.received is not None
    }
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
    if clusters:
        devices = {d: msgspec.structs.replace(t, cluster=clusters.get(d, NO_CLUSTER)) for d, t in devices.items()}
    return Memory(rounds=now, gains=gains, devices=devices, networks=memory.networks)


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

"""What the server remembers of the devices between rounds: metrics, their changes, and who decided a round.

MMiC, arXiv 2505.06911, equations 14 to 17:  alpha_i,t = a_i,t - a_i,t-1;  phi_i += 1 when i is core in round t.
a is a device's metric after local training, higher is better. The global model's metric is the weighted mean of what
the devices measured on the model they were sent, and alpha* is its change (D-M5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edgefl.aggregation.coalition import coalition_return, core_members
from edgefl.errors import ModelError

#: Returns kept of a device. At 16 bytes or so each in JSON, 50 devices come to 0.2 MB, read and written every round.
RETURNS_KEPT = 200


class Track(msgspec.Struct, frozen=True):
    """What is known of one device. ``returns``: round (from 1) -> change of its metric since it last reported."""

    metric: float | None = None  # after local training; None: it never reported one
    returns: dict[int, float] = {}
    core: int = 0  # rounds in which it was core
    selected: int = 0  # rounds in which it took part
    weight: float = 0.0  # in its last round
    cluster: int = -1  # -1: none


class Memory(msgspec.Struct, frozen=True):
    """What is known after ``rounds`` rounds. ``metric``: the global model's; ``gain``: alpha*, its last change.

    ``networks``: once the last round has trained them, "match/<m>" -> the keys of the state that speak for it, with
    their weights.
    """

    rounds: int = 0
    metric: float | None = None
    gain: float = 0.0
    devices: dict[str, Track] = {}
    networks: dict[str, dict[str, float]] = {}


def note_round(
    memory: Memory, metrics: Mapping[str, float], received: Mapping[str, float], weights: Mapping[str, float]
) -> Memory:
    """The memory after one more round, whose participants are the keys of ``weights`` (any scale, 0 or more).

    ``metrics``: a participant's metric after local training; ``received``: that of the model it was sent. Either may
    lack devices that measured nothing: they get no return this round. A return needs an earlier metric. Nobody is core
    in a round in which alpha* is unknown. Raises ModelError, naming the device, for a metric of a device that took no
    part and for a metric or weight that is not a finite number.
    """
    _check(metrics, received, weights)
    now = memory.rounds + 1
    old = {device: memory.devices.get(device, Track()) for device in sorted(weights)}
    returns: dict[str, float] = {}
    for device, track in old.items():
        if device in metrics and track.metric is not None:
            returns[device] = metrics[device] - track.metric
    measured = {device: value for device, value in received.items() if weights[device] > 0}
    metric = coalition_return(weights, measured) if measured else None
    gain = metric - memory.metric if metric is not None and memory.metric is not None else None
    core = core_members(weights, returns, gain) if gain is not None else set()
    devices = dict(memory.devices)
    for device, track in old.items():
        kept = {**track.returns, now: returns[device]} if device in returns else track.returns
        devices[device] = msgspec.structs.replace(
            track,
            metric=metrics.get(device, track.metric),
            returns=dict(sorted(kept.items())[-RETURNS_KEPT:]),
            core=track.core + (device in core),
            selected=track.selected + 1,
            weight=weights[device],
        )
    return Memory(
        rounds=now,
        metric=memory.metric if metric is None else metric,
        gain=memory.gain if gain is None else gain,
        devices=devices,
        networks=memory.networks,
    )


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

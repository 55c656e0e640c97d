"""Aggregation weights of one part, per scope (global, cluster, device).

Where devices of a round train different depths (schedule mixed, budgets), the mean over those that trained a part would
let a single one replace everybody's, below what the others trained upon the old one. With combine: {mean: {absent:
keep}} the others keep it: theta' = sum over trained w_k theta_k + sum over absent w_k theta, w over both sums to 1.
An audience is the prefix of a state's part (``edgefl.aggregation.server_state``): everyone, a cluster, a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from edgefl.aggregation.mean import MisfitError
from edgefl.aggregation.server_state import EVERYONE, of_cluster, of_device
from edgefl.errors import ProtocolError
from edgefl.models.spec import is_matcher, modality_of
from edgefl.plan.stages import encoder_stage
from edgefl.registry import Choice


def proportional(amounts: Mapping[str, float]) -> dict[str, float]:
    """Weights, sum 1, of the devices whose amount is above 0, in order of name; empty when there is none."""
    present = {device: amount for device, amount in sorted(amounts.items()) if amount > 0}
    total = sum(present.values())
    return {device: amount / total for device, amount in present.items()}


def capped(shares: Mapping[str, float], most: float) -> dict[str, float]:
    """Weights (sum 1) of which none exceeds ``most``: what is above it goes to the others, in proportion to theirs.

    Where ``most`` is less than one over their number, all weigh the same.
    """
    if most >= 1 or not shares:
        return dict(shares)
    high: set[str] = set()
    while over := {d for d, w in _rest(shares, high, most).items() if w > most * (1 + 1e-12)} - high:
        high |= over
    if len(high) == len(shares):
        return dict.fromkeys(shares, 1 / len(shares))
    return _rest(shares, high, most)


def _rest(shares: Mapping[str, float], high: set[str], most: float) -> dict[str, float]:
    """The devices in ``high`` weigh ``most``; the others share what is left."""
    left = sum(weight for device, weight in shares.items() if device not in high)
    scale = (1 - most * len(high)) / left if left else 0.0
    return {device: most if device in high else weight * scale for device, weight in shares.items()}


Load = Callable[[str], Mapping[str, np.ndarray]]
#: audience -> device -> weight, sum 1.
Shares = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Standing:
    """Facts about the devices of a round that their weights depend on.

    ``modalities``: how many each has; ``clusters``: the cluster of each, empty: there are none; ``similarity``: the
    weights by the models' outputs; ``own_models``: clusters have their own; ``small``: how small networks combine;
    ``most``: the largest share that a device may have of a part.
    """

    modalities: Mapping[str, int] = field(default_factory=dict)
    clusters: Mapping[str, int] = field(default_factory=dict)
    similarity: Mapping[str, float] = field(default_factory=dict)
    own_models: bool = False
    small: str = "average"
    most: float = 1.0


def absent_from(part: str, trained: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """device -> samples, of the devices that hold samples of the part's modality and trained without it.

    ``trained``: device -> part -> samples. Encoder stages alone can be left out for a stage or a budget. A device that
    lacks the modality is not absent: of its encoder it knows nothing.
    """
    if encoder_stage(part) is None:
        return {}
    owner = modality_of(part)
    held = {
        device: max((n for p, n in samples.items() if owner is None or modality_of(p) == owner), default=0)
        for device, samples in trained.items()
        if part not in samples
    }
    return {device: count for device, count in held.items() if count > 0}


def shares_of(
    part: str,
    counts: Mapping[str, int],
    slot: Choice,
    standing: Standing,
    load: Load,
    absent: Mapping[str, int] | None = None,
) -> Shares:
    """The shares of ``part`` for each audience; empty when no device has samples of it.

    ``counts``: device -> samples; ``load``: a device's tensors of this part; it raises MisfitError or ProtocolError for
    tensors that do not fit it, whose devices have no row and no column in the relationship graph. ``absent``: device ->
    samples, of those that keep the part; they have a share where a device that trained it has one.
    """
    if not any(count > 0 for count in counts.values()):
        return {}
    shares = _shares_of(part, {**counts, **(absent or {})}, slot, standing, load)
    return {audience: weights for audience, weights in shares.items() if weights.keys() - (absent or {}).keys()}


def _shares_of(part: str, counts: Mapping[str, int], slot: Choice, standing: Standing, load: Load) -> Shares:
    everyone = _weigh(counts, slot, standing)
    if is_matcher(part):
        return _small_networks(capped(proportional(counts), standing.most), standing.small)
    shares = {EVERYONE: everyone}
    if slot.method.personal is not None and part.startswith("head/") and modality_of(part) is not None:
        graph = slot.method.personal({device: partial(load, device) for device in everyone if _sound(device, load)})
        shares |= {of_device(device): row for device, row in graph.items()}
    elif standing.own_models:
        for cluster in sorted(set(standing.clusters.values())):
            within = {d: counts[d] for d in everyone if standing.clusters.get(d) == cluster}
            if mine := _weigh(within, slot, standing):
                shares[of_cluster(cluster)] = mine
    return shares


def _sound(device: str, load: Load) -> bool:
    """Whether a device's tensors match the layout; the global mean records the reason where not."""
    try:
        load(device)
    except (MisfitError, ProtocolError):
        return False
    return True


def _small_networks(weights: Mapping[str, float], how: str) -> Shares:
    """Matcher networks: averaged, the largest device's only, or the average plus one per device."""
    if how == "largest":
        return {EVERYONE: {max(sorted(weights), key=lambda device: weights[device]): 1.0}}
    alone = {of_device(device): {device: 1.0} for device in weights} if how == "ensemble" else {}
    return {EVERYONE: dict(weights), **alone}


def _weigh(counts: Mapping[str, int], slot: Choice, standing: Standing) -> dict[str, float]:
    return capped(_weighed(counts, slot, standing), standing.most)


def _weighed(counts: Mapping[str, int], slot: Choice, standing: Standing) -> dict[str, float]:
    if slot.method.similarity is not None:
        known = {d: standing.similarity[d] for d, count in sorted(counts.items()) if count > 0}
        total = sum(known.values())
        return {device: weight / total for device, weight in known.items()}
    found: dict[str, float] = slot.bind(slot.method.weigh)(counts, standing.modalities)
    return found

"""The coalitional return of a cluster's devices in a round, and the core devices among them.

MMiC, arXiv 2505.06911, equations 14 to 16:  A_S = sum_i w_i alpha_i / sum_i w_i over i in S;  i is core when
A_S >= alpha* and A_{S without i} < alpha*.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.errors import ModelError

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

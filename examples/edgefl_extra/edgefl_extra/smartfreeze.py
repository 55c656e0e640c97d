"""Pace after SmartFreeze (Wu et al. 2024, arXiv 2408.09101): a stage ends when its blocks only wander.

A block's perturbation after round n compares how far its parameters came with how far they went, u(n) their changes
in that round:

    p(n) = |E(n)|_1 / |A(n)|_1,    E(n) = a E(n - 1) + (1 - a) u(n),    A(n) = a A(n - 1) + (1 - a) |u(n)|

It is near 1 while parameters move in one direction and falls towards 0 around an optimum. Fading sums in place of a
window are those of adaptive parameter freezing (Chen et al., ICDCS 2021): the server keeps two numbers a parameter.
The stage ends when the least-squares slope of p over ``window`` rounds was within ``slope`` of 0 for ``patience``
rounds. The paper's choice of devices is not here: that is a slot of its own (select).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from edgefl.aggregation.mean import BUFFERS
from edgefl.registry import Option, Verdict, register
from edgefl.roles import Pace

if TYPE_CHECKING:
    from edgefl.aggregation.mean import Tensors
    from edgefl.aggregation.pace import StageRound


def observe(
    state: Tensors | None, previous: Tensors, now: Tensors, *, memory: float
) -> tuple[dict[str, float], Tensors]:
    """|E|_1 and |A|_1 of one part after a round, and E and A of each of its tensors."""
    kept: dict[str, np.ndarray] = {}
    weights = [name for name in now if not name.endswith(BUFFERS)]
    for name in weights:
        change = np.asarray(now[name], np.float64) - np.asarray(previous[name], np.float64)
        for kind, value in (("net", change), ("path", np.abs(change))):
            before = 0.0 if state is None else state[f"{kind}/{name}"].astype(np.float64)
            kept[f"{kind}/{name}"] = np.asarray(memory * before + (1 - memory) * value, np.float32)
    sums = {kind: sum(float(np.abs(kept[f"{kind}/{n}"]).sum()) for n in weights) for kind in ("net", "path")}
    return sums, kept


def perturbations(rounds: Sequence[StageRound]) -> list[float]:
    """p after each round, of the encoder blocks that the stage trains; of all parts where it trains none."""
    blocks = {part for one in rounds for part in one.facts if "/stage" in part}
    found = []
    for one in rounds:
        facts = [each for part, each in one.facts.items() if part in blocks or not blocks]
        path = sum(each["path"] for each in facts)
        found.append(sum(each["net"] for each in facts) / path if path > 0 else 0.0)
    return found


def judge(rounds: Sequence[StageRound], *, window: float, slope: float, patience: float) -> Verdict:
    """Over when the perturbation has been level; the last model is kept."""
    values, width = perturbations(rounds), int(window)
    recent = [values[end - width : end] for end in range(width, len(values) + 1)][-int(patience) :]
    level = [abs(np.polyfit(range(width), one, 1)[0]) < slope for one in recent]
    return Verdict(len(rounds), over=len(level) == int(patience) and all(level))


register(
    Pace(
        "smartfreeze",
        "when the changes of the trained blocks no longer add up (SmartFreeze)",
        {
            "window": Option(5, "rounds of a line through the perturbation", least=2),
            "slope": Option(0.02, "change of the perturbation a round that counts as none", least=0),
            "patience": Option(3, "rounds in a row without a change", least=1),
            "memory": Option(0.8, "a, by which the sums over earlier rounds fade", least=0, most=0.999),
        },
        per_round=True,
        judge=judge,
        fewest=lambda window, patience: int(window + patience) - 1,
        observe=observe,
    )
)

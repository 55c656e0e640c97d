"""Paces: when a stage ends.

planned:        after its rounds.
early_stopping: when the devices' hold-outs have not become better for a number of rounds (Prechelt 1998, "Early
                stopping, but when?"), with the model of the round that was best.

The level l(n) of the model after n rounds is fitted to the losses L_i(n) that devices i measured on their hold-outs,
log L_i(n) ~ a_i + l(n), so that devices that come and go do not shift it: by medians (median polish, Tukey 1977), then
by one step to the mean of what these leave over, in which none counts as more than 4.5 times their median
(Huber 1964): one device that lies has as much say as the noise of another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from edgefl.aggregation.pace import StageRound
from edgefl.registry import Option, Rule, Verdict, register
from edgefl.roles import Pace

#: Loss below which a model is as good as it gets: half of it would be no progress.
_LEAST_LOSS = 0.01
#: Sweeps of the polish: it settles in two or three.
_SWEEPS = 5
#: Times the median of the residuals beyond which one counts as no more: 0.1 % of normal ones are.
_LARGEST_RESIDUAL = 4.5


def by_holdouts(rounds: Sequence[StageRound], *, patience: float) -> Verdict:
    """The round with the lowest loss on the hold-outs; over ``patience`` rounds later that its judges share."""
    levels = levels_of(rounds)
    if not levels:
        return Verdict(0, over=False)
    best = min(levels, key=lambda n: levels[n])
    judges = rounds[best].losses.keys()
    later = [n for n in levels if n > best and judges & rounds[n].losses.keys()]  # others have no common scale
    return Verdict(best, over=len(later) >= patience)


def levels_of(rounds: Sequence[StageRound]) -> dict[int, float]:
    """n -> level of the model after n rounds, of those that any device judged."""
    logs = {
        n: {device: math.log(max(loss, _LEAST_LOSS)) for device, loss in one.losses.items()}
        for n, one in enumerate(rounds)
        if one.losses
    }
    own = dict.fromkeys({device for one in logs.values() for device in one}, 0.0)
    levels = dict.fromkeys(logs, 0.0)
    for _ in range(_SWEEPS):
        levels = {n: statistics.median(value - own[i] for i, value in one.items()) for n, one in logs.items()}
        own = {i: statistics.median(one[i] - levels[n] for n, one in logs.items() if i in one) for i in own}
    left = {n: [value - own[i] - levels[n] for i, value in one.items()] for n, one in logs.items()}
    most = _LARGEST_RESIDUAL * statistics.median(abs(one) for each in left.values() for one in each) if left else 0.0
    return {n: level + statistics.fmean(max(-most, min(most, one)) for one in left[n]) for n, level in levels.items()}


register(
    Pace("planned", "after its planned rounds", default=True),
    Pace(
        "early_stopping",
        "when the model has not become better on the devices' hold-outs, with its best round's model",
        {"patience": Option(5, "rounds without a better model before the stage ends", least=1)},
        per_round=True,
        rules=(
            Rule(
                "select",
                "partial",
                "early_stopping compares rounds by the devices that they share, and this selection changes them; set "
                "slots.select: all, or pace: planned",
                wanted=False,
            ),
        ),
        judge=by_holdouts,
        fewest=lambda patience: int(patience) + 1,
        returns=True,
    ),
)

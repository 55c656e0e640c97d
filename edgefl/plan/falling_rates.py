"""Learning rate schedules over a run: a factor for each round, counted over all stages.

    warm-up of W rounds: (t + 1) / (W + 1) for t < W  (after arXiv 1706.02677), so that the first round learns
    cosine: (1 + cos(pi t / T)) / 2  (SGDR without restarts, arXiv 1608.03983);  step: factor ^ floor(t / rounds)

t rounds of T are over, of a fall without those of the warm-up; the closing round is none of them. The curve is the
run's and not a stage's, so that an end-to-end run and a staged one have the same rate in the same round, and differ
in the schedule alone. It follows from stage and round: a round that is tried again, or after a restart, has the rate
it had (docs/decisions/0053).
"""

from __future__ import annotations

import math

import msgspec

from edgefl.plan.job import Hyper, RunPlan
from edgefl.plan.stages import is_closing
from edgefl.records import Attempt


def factor_at(plan: RunPlan, stage: int, number: int) -> float:
    """The factor of the run's rates in a round, counted from 1 in its stage; 1 in the closing round."""
    if is_closing(plan.stages[stage - 1]):
        return 1.0
    fall = plan.lr_fall
    over = sum(one.rounds for one in plan.stages[: stage - 1]) + number - 1 - fall.warmup
    if over < 0:
        return (over + fall.warmup + 1) / (fall.warmup + 1)
    if fall.kind == "cosine":
        total = sum(one.rounds for one in plan.stages if not is_closing(one)) - fall.warmup
        return (1.0 + math.cos(math.pi * over / total)) / 2.0
    return fall.factor ** (over // fall.rounds) if fall.kind == "step" else 1.0


def fallen(plan: RunPlan, hyper: Hyper, attempt: Attempt) -> Hyper:
    """A device's hyper-parameters, planned for the stage, with the rates of this attempt's round."""
    factor = factor_at(plan, attempt.stage, attempt.round)
    return msgspec.structs.replace(hyper, lr={group: rate * factor for group, rate in hyper.lr.items()})

"""Rounds of a stage for its pace, and the model of the best one."""

from __future__ import annotations

import msgspec

from edgefl.records import Manifest
from edgefl.registry import Choice


class StageRound(msgspec.Struct, frozen=True):
    """One round of a stage.

    ``losses``: device -> loss on its hold-out of the model that the round began with; ``facts``: part -> what the pace
    observed of its change in the round.
    """

    losses: dict[str, float] = {}
    facts: dict[str, dict[str, float]] = {}


class StageTrack(msgspec.Struct, frozen=True):
    """Track of stage ``index``; 0: none.

    ``state``: the model after the ``best`` of its rounds; ``over``: it has ended.
    """

    index: int = 0
    rounds: tuple[StageRound, ...] = ()
    best: int = 0
    state: Manifest = {}
    over: bool = False


def noted(track: StageTrack, pace: Choice, stage: int, this: StageRound, previous: Manifest) -> StageTrack:
    """The track after one more round of ``stage``, which began with the model ``previous``.

    A round may seem best in hindsight whose model is gone: ``best`` is then the last one that was best in its turn.
    """
    if pace.method.judge is None:
        return StageTrack()
    if track.index != stage:
        track = StageTrack(index=stage, state=previous)
    before, rounds = len(track.rounds), (*track.rounds, this)
    verdict = pace.bind(pace.method.judge)(rounds)
    if verdict.best > before:
        return StageTrack(stage, rounds, verdict.best, {}, verdict.over)
    if verdict.best == before:
        return StageTrack(stage, rounds, before, previous, verdict.over)
    return StageTrack(stage, rounds, track.best, track.state, verdict.over)

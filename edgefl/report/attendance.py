"""Attendance of devices: rounds trained and missed, with reasons."""

from __future__ import annotations

from typing import NamedTuple

from edgefl.report.decisions import BEHIND, NOT_CHOSEN, absences
from edgefl.report.refusals import REASONS, reason
from edgefl.run_records import RunReport


class Missed(NamedTuple):
    """A device with missed rounds: it trained ``trained`` of ``of``; ``why``: reasons for the rest."""

    device: str
    trained: int
    of: int
    why: tuple[str, ...]

    @property
    def text(self) -> str:
        """ "wrist trained 6 of 12 rounds (bytes over budget)"."""
        rounds = f"{self.trained} of {self.of} rounds" if self.trained else "no round"
        return f"{self.device} trained {rounds}" + f" ({', '.join(self.why)})" * bool(self.why)


class Attendance(NamedTuple):
    """Device rounds (devices × rounds) trained, of those possible, and the devices with missed ones."""

    trained: int
    of: int
    missed: tuple[Missed, ...]


def attendance(report: RunReport) -> Attendance:
    """Attendance in the finished rounds; those not offered by client selection, or during other work, do not count."""
    held = {(row.stage, row.round) for row in report.rounds if row.status == "done"}
    did: dict[str, set[tuple[int, int]]] = {row.device: set() for row in report.devices}
    whys: dict[str, dict[str, None]] = {row.device: {} for row in report.devices}
    for row in report.assignments:
        if (row.stage, row.round) in held and row.device in did:
            if row.status == "done":
                did[row.device].add((row.stage, row.round))
            else:
                why = reason(row.refusal) if row.refusal else REASONS.get(row.status, row.status)
                whys[row.device][why] = None
    spared = dict.fromkeys(did, 0)
    for device, absent in absences(report).items():
        for why, rounds in absent.items():
            here = len(held & set(rounds)) if device in did else 0
            if here and (why == BEHIND or why.startswith(NOT_CHOSEN)):
                spared[device] += here
            elif here:
                whys[device][why] = None
    missed = [
        Missed(device, len(rounds), of, tuple(whys[device]))
        for device, rounds in did.items()
        if len(rounds) < (of := len(held) - spared[device])
    ]
    return Attendance(sum(map(len, did.values())), len(held) * len(did) - sum(spared.values()), tuple(missed))

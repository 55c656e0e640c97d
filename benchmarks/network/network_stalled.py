"""Rounds beside a device whose supervisor is stopped (SIGSTOP) for longer than several deadlines."""

from __future__ import annotations

import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.network.network_fleet import DEVICES, SILENCE_S, TELLING_S, VICTIM, Network, fleet_over
from benchmarks.network.network_links import Conditions
from coordinator.core.timeouts import Timeouts
from edgefl.run_records import EventRow, RunReport

#: The stopped device misses several deadlines, and is silent for longer than SILENCE_S.
DEADLINE_S = 8.0
STOPPED_ROUNDS = 16
SLOW = Conditions(delay_s=0.02, rate=4_000_000)


async def beside_a_stalled_device(folder: Path) -> tuple[list[str], list[str]]:
    """What was seen, and what is wrong."""
    with Network() as network:
        network.set(SLOW)
        async with fleet_over(network, folder, STOPPED_ROUNDS, quorum=0.5, deadline_s=DEADLINE_S) as fleet:
            state: dict[str, float] = {}

            def hear(row: EventRow) -> None:
                victim = fleet.agents[VICTIM]
                if row.kind == "round_started" and row.round == 3:
                    state["stopped"] = row.at
                    victim.send_signal(signal.SIGSTOP)
                elif row.kind == "device_left" and row.device == VICTIM:
                    state["left"] = row.at
                elif row.kind == "round_closed" and "left" in state and "going" not in state:
                    state["going"] = row.at  # a round after it was told away
                    victim.send_signal(signal.SIGCONT)

            fleet.on_event = hear
            if trouble := await fleet.finish():
                return [], [trouble]
            report, _ = fleet.result()
    return stalled_words(fleet.events, report, state)


def stalled_words(
    events: Sequence[EventRow], report: RunReport, state: dict[str, float]
) -> tuple[list[str], list[str]]:
    """What was seen of the run beside a stalled device, and what is wrong."""
    begun = {row.round: row.at for row in events if row.kind == "round_started"}
    own = [row for row in events if row.kind == "update" and row.device != VICTIM]
    healthy = {n: max(row.at - begun[n] for row in own if row.round == n) for n in begun}
    stalled = [row.round for row in report.rounds if VICTIM not in row.participants]
    free = [number for number in begun if number not in stalled and number > 1]
    wrong = []
    if {tuple(row.participants) for row in report.rounds} != {DEVICES, DEVICES[1:]}:
        wrong.append("a round was closed without a healthy device")
    if "left" not in state or abs(state["left"] - state["stopped"] - SILENCE_S) > TELLING_S + Timeouts().heartbeat_s:
        wrong.append(f"{VICTIM} was not told away in time")
    if VICTIM not in report.rounds[-1].participants:
        wrong.append(f"{VICTIM} did not take part again")
    slowest = max(healthy[number] for number in stalled) if stalled else 0.0
    if slowest > DEADLINE_S / 2:
        wrong.append(f"a healthy device took {slowest:.1f} s beside the stalled one")
    rounds = {row.round: (row.ended_at or 0) - row.started_at for row in report.rounds}
    words = [
        f"rounds with everybody: median {statistics.median(rounds[n] for n in free):.1f} s",
        f"updates of the healthy in them: after {statistics.median(healthy[n] for n in free):.1f} s",
        f"rounds without the stopped device: {len(stalled)}, of {', '.join(f'{rounds[n]:.1f}' for n in stalled)} s",
        f"updates of the healthy in them: after {slowest:.1f} s at most; the deadline is {DEADLINE_S:.0f} s",
        f"told away {state.get('left', 0) - state.get('stopped', 0):.0f} s after it was stopped",
        f"took part in the last round: {'yes' if VICTIM in report.rounds[-1].participants else 'no'}",
    ]
    return words, wrong

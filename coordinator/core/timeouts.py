"""Every wait of the coordinator in one place, with its reason. What a run's owner decides (joining, deadline) is in
:class:`edgefl.plan.job.RoundPolicy`, not here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: A second process (a report, a console) may hold the ledger's lock for one transaction: milliseconds. More is a hang.
LEDGER_BUSY_S: Final = 15.0
#: A database server that is lost in the middle of a run is waited for: a restart takes seconds, a standby that takes
#: over up to half a minute. Nothing else happens meanwhile, and devices are silent no longer than they may be.
LEDGER_AWAY_S: Final = 30.0
LEDGER_RETRY_S: Final = 0.25
#: Seconds until a database server that does not answer is given up.
LEDGER_CONNECT_S: Final = 10
#: Fleet size from which heartbeats become less frequent, so that all devices together send a hundred a second.
FULL_PACE: Final = 1000


def slowed(devices: int) -> float:
    """Factor of ``heartbeat_s`` and ``silence_s`` in a fleet of so many devices."""
    return max(1.0, devices / FULL_PACE)


class Timeouts(NamedTuple):
    """Seconds."""

    #: How often time is looked at. Deadlines are minutes, stalls seconds: a quarter second is not seen.
    tick_s: float = 0.25
    #: Beat asked of the devices, times ``slowed``: small against a deadline, and 200 make only 20 messages a second.
    heartbeat_s: float = 10.0
    #: A device is lost after three silent beats and a half: one lost packet or one long step is no lost device.
    silence_s: float = 35.0
    #: A beat that does not name an offer younger than this may have left before the offer came: repeated at once, it
    #: would have everything sent twice. A slow link with a chunk before it takes seconds; a lost offer waits this long.
    offer_s: float = 10.0
    #: How long a round waits for absent devices once all others are done: a restart or a change of network takes less.
    grace_s: float = 20.0
    #: Pause before a round is tried again, times the tries so far: devices may still be ending a step.
    retry_pause_s: float = 2.0
    #: A device that is online but has not introduced itself is asked again after this, a few times: its hello may have
    #: been sent before this coordinator listened.
    introduce_s: float = 1.0
    #: Messages that are still unsent when the run ends are given this long to leave.
    drain_s: float = 5.0

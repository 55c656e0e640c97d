"""Every time the agent waits for something, in seconds: each named, with its reason."""

from __future__ import annotations

from typing import Final

#: How often timers are looked at. Finer than every other figure here; 2 wake-ups a second cost no measurable CPU.
TICK_S: Final = 0.5
#: Sign of life until a coordinator sets the interval (``Welcome.heartbeat_s``).
HEARTBEAT_S: Final = 10.0
#: The first welcome is taken for the answer to the hello when it comes within this; later, the hello went out before
#: that coordinator was there, and is sent again. Longer than a round trip of a bad mobile link.
GREETING_S: Final = 2.0
#: Progress is for people watching: once a second is as fast as anyone reads; 200 devices make 200 messages a second.
PROGRESS_S: Final = 1.0
#: An update without an answer is announced again. A coordinator that restarts needs seconds to read its ledger, and
#: a second announcement is harmless.
ANNOUNCE_S: Final = 15.0
#: The idle trainer gets this long to end after its input is closed, before it is killed.
TRAINER_STOP_S: Final = 3.0
#: First wait before a trainer that died while it was getting ready is started again; doubles each time.
TRAINER_RESTART_S: Final = 1.0
#: After so many deaths in a row while getting ready, the agent gives up: importing torch does not heal by itself.
TRAINER_RESTARTS: Final = 3
#: Wait before the broker is dialled again when it was unreachable at start: doubles from the first to the last, and
#: each time some part of its second half is left out by chance: devices that got power together knock one by one.
DIAL_FIRST_S: Final = 1.0
DIAL_LAST_S: Final = 30.0
#: Time to end in: offline message to the broker, stop of the trainer. Service managers kill after 10 s or more.
LEAVE_S: Final = 5.0
#: How often a device looks whether its certificate is due: clocks of small boards jump when they hear of the time.
RENEWAL_CHECK_S: Final = 3600.0
#: An answer to a renewal that has not come by then is asked for again: no coordinator may be there for days.
RENEWAL_RETRY_S: Final = 600.0
#: What the agent has saved is synced this long afterwards: quick rounds save a dozen times a second, and each sync has
#: the disk write its journal. A loss of power costs the work of that time, which is trained again.
FLUSH_S: Final = 1.0

"""Trace files of FLASH: states and link speeds of smartphones, as JSON.

Yang et al., "Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data", WWW 2021
(github.com/PKU-Chengxu/FLASH: data/state_traces.json, models/speed_distri.json). Traces are {device: {"messages":
TEXT}}, TEXT a line "YYYY-MM-DD HH:MM:SS<tab>STATE" for each change; speeds are {device: {"down_u", "down_sigma",
"up_u", "up_sigma"}} in KiB a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from edgefl.errors import ConfigError, Problem
from edgefl.storage.disk import read_at_most
from edgefl.traces import DAY_MS, Change, LinkSpeed, Need, Pattern, pattern_of

T = TypeVar("T")

#: 1,000 phones over some weeks are tens of MB.
MAX_BYTES = 2**29
#: A wrong year in one line would make a pattern of away.
MOST_MS = 366 * DAY_MS
#: State in the file -> what it says. A locked screen is idle, as FLASH has it; other networks than Wi-Fi are none.
_SAYS: dict[str, tuple[Need, bool] | None] = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "screen_lock": ("idle", True),
    "screen_unlock": ("idle", False),
    **dict.fromkeys(("screen_on", "screen_off", "battery_low", "battery_okay", "phone_on", "phone_off")),
}
_PERCENT = re.compile(r"\d+(\.\d+)?%")
_WAY = "Mend it, or take that device out of the file; docs/simulating.md says what a file has."


class _States(msgspec.Struct):
    messages: str


class _Speeds(msgspec.Struct):
    down_u: float
    down_sigma: float
    up_u: float
    up_sigma: float


def read_states(file: Path, needs: Sequence[Need]) -> tuple[list[Pattern], list[str]]:
    """Patterns of the devices in the file, and why others have none. Raises ConfigError, also if none has one."""
    found, faults = list[Pattern](), list[str]()
    for name, device in _read(file, dict[str, _States]).items():
        try:
            found.append(_pattern(device.messages, needs))
        except ValueError as error:
            faults.append(f"{name[:64]}: {error}")
    if not found:
        raise _refused(file, faults[0] if faults else "it names no device")
    return found, faults


def read_links(file: Path) -> list[LinkSpeed]:
    """Link speeds in the file. Raises ConfigError."""
    found = []
    for name, one in _read(file, dict[str, _Speeds]).items():
        link = LinkSpeed(*(1024 * value for value in (one.down_u, one.down_sigma, one.up_u, one.up_sigma)))
        if not all(map(math.isfinite, link)) or min(link) < 0 or not link.down or not link.up:
            raise _refused(file, f"{name[:64]}: speeds are above zero, and their deviations not below")
        found.append(link)
    if not found:
        raise _refused(file, "it names no device")
    return found


def _pattern(messages: str, needs: Sequence[Need]) -> Pattern:
    """The pattern of a device's messages. Raises ValueError with the line."""
    moments, says = list[datetime](), list[tuple[Need, bool] | None]()
    for number, line in enumerate(messages.split("\n"), 1):
        if not line.strip():
            continue
        at, tab, state = line.strip().partition("\t")
        state = state.strip().lower()
        try:
            moment = datetime.strptime(at.strip(), "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007 - the phone's own time
        except ValueError:
            tab = ""
        if not tab or (state not in _SAYS and not _PERCENT.fullmatch(state)):
            raise ValueError(f"line {number} of its messages is no time, tab and known state: {line[:60]!r}")
        moments.append(moment)
        says.append(_SAYS.get(state))
    if len(set(moments)) < 2:
        raise ValueError("its messages span no time")
    began = min(moments)
    since = [_ms(moment - began) for moment in moments]
    if max(since) > MOST_MS:
        raise ValueError(f"its messages span more than {MOST_MS // DAY_MS} days")
    changes = [Change(at, *said) for at, said in zip(since, says, strict=True) if said is not None]
    found = pattern_of(changes, max(since), needs)
    return found._replace(begins_ms=_ms(began - began.replace(hour=0, minute=0, second=0)), turn_ms=DAY_MS)


def _ms(span: timedelta) -> int:
    return 1000 * int(span.total_seconds())


def _read(file: Path, kind: type[dict[str, T]]) -> dict[str, T]:
    try:
        data = read_at_most(file, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _refused(file, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        line = data.count(b"\n", 0, int(at[1])) + 1 if at else 0
        raise _refused(file, str(error), line) from None


def _refused(file: Path, why: str, line: int = 0) -> ConfigError:
    return ConfigError(str(file), [Problem("the trace", why, line)], remedy=_WAY)

"""Forecast of a real fleet from the predictions in a simulated run's ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from edgefl.report.grid import Column, Grid, table
from edgefl.report.units import mib, quantity, seconds
from edgefl.run_records import RunReport

#: Rates that a round's time is predicted by, beside FLOPs.
_RATES = ("operation_s", "written_bytes", "down_bytes", "up_bytes")
#: What became of devices that were asked, by the status of their assignment; all others failed.
_ENDS = {"done": "came back", "lost": "left in their round", "late": "late"}


class Forecast(NamedTuple):
    """Time, energy and bytes of a run's rounds on real devices, by its ledger's predictions. Base units.

    ``seconds``: of all rounds, each as long as its slowest device; with traces, of the whole run with its waits;
    ``slowest``: device profile -> rounds that it was the slowest in; ``energy_j``: of all devices; None where no speed,
    or no power, is known. ``payload_bytes``: both ways. ``untimed``: device rounds without a predicted time.
    ``ends``: what became of the devices that were asked -> how many, over all attempts.
    """

    rounds: int
    seconds: float | None
    slowest: dict[str, int]
    payload_bytes: float
    energy_j: float | None
    untimed: int
    unknown: tuple[str, ...]  # fields of the profiles' speed that some device has none of, whose share is missing
    ends: dict[str, int]
    traces: bool


def forecast(report: RunReport) -> Forecast:
    """Forecast of the run's rounds on devices of its profiles."""
    profiles = {row.device: row.profile for row in report.devices}
    virtual = [float(event.data["simulated_s"]) for event in report.events if "simulated_s" in event.data]
    rounds: dict[tuple[int, int], list[tuple[float, str]]] = defaultdict(list)
    payload = joules = 0.0
    untimed = unpowered = 0
    asked = [row for row in report.assignments if row.status not in {"refused", "quarantined"}]
    done = [row for row in asked if row.status == "done"]
    for row in asked if virtual else done:
        measured = {name: figure.value for name, figure in row.measured.items()}
        predicted = {name: figure.value for name, figure in row.predicted.items()} if row.status == "done" else measured
        payload += sum((predicted | measured).get(name) or 0.0 for name in ("payload_down_bytes", "payload_up_bytes"))
        wall, energy = (measured if virtual else predicted).get("wall_s"), predicted.get("energy_j")
        joules += energy or 0.0
        if row.status == "done":
            rounds[row.stage, row.round].append((wall or 0.0, profiles.get(row.device, "")))
            untimed += wall is None
            unpowered += energy is None
    slowest: dict[str, int] = defaultdict(int)
    for spent in rounds.values():
        slowest[max(spent)[1]] += 1
    known = bool(done) and not untimed
    seconds = sum(max(spent)[0] for spent in rounds.values()) if known else None
    power = joules if done and not unpowered else None
    trained = {row.device for row in done}
    speeds = [row.capabilities.speed for row in report.devices if row.device in trained]
    unknown = tuple(name for name in _RATES if any(not getattr(speed, name) for speed in speeds))
    return Forecast(
        len(rounds),
        max(virtual) if virtual else seconds,
        dict(slowest) if known else {},
        payload,
        power,
        untimed,
        unknown,
        dict(Counter(_ENDS.get(row.status, "failed") for row in asked)),
        bool(virtual),
    )


def sentence(found: Forecast) -> str:
    """The forecast in a sentence."""
    if found.seconds is None:
        missing = "no device trained" if not found.rounds else f"{found.untimed} device rounds have no predicted time"
        way = "a device profile that has speed.flops gives one, and `edgefl-agent profile` measures it"
        return f"The time of {found.rounds} rounds is not known, since {missing}: {way}."
    energy = f" and {quantity(found.energy_j, 'J')}" if found.energy_j else ""
    asked, came = sum(found.ends.values()), found.ends.get("came back", 0)
    what = f"{found.rounds} rounds take {seconds(found.seconds)}, {mib(found.payload_bytes)} of parts{energy}"
    return f"{what}; of {asked:,} device rounds that were asked for {came:,} came back."


def basis(found: Forecast) -> Grid:
    """Each figure of the forecast with what it follows from."""
    rows: list[tuple[str, str, str]] = []
    if found.seconds is not None:
        most, count = max(found.slowest.items(), key=lambda item: item[1], default=("", 0))
        slow = f"each as long as its slowest device ({most or 'one of no profile'} in {count} of them)"
        waits = "the run's virtual time: profiles, links, traces, and waits for devices"
        rows.append(("wall time", seconds(found.seconds), waits if found.traces else slow))
    rows.append(("bytes", mib(found.payload_bytes), "parts both ways as counted, without MQTT's own bytes"))
    if found.energy_j:
        rows.append(("energy", quantity(found.energy_j, "J"), "all devices: speed.power_w and the predicted seconds"))
    whys = {"came back": "their updates count", "left in their round": "their traces", "late": "round.deadline_s"}
    plain = whys if found.traces else {"came back": "nobody is away without --trace"}
    rows += [(end, f"{count:,}", plain.get(end, "what the run met")) for end, count in sorted(found.ends.items())]
    notes = []
    if found.unknown and found.seconds is not None:
        fields = ", ".join(f"speed.{name}" for name in found.unknown)
        way = "`edgefl-agent profile --broker URL` on such a device measures them"
        notes.append(f"A real fleet takes longer: a profile here lacks {fields}. {way}.")
    columns = [
        Column[tuple[str, str, str]]("figure", lambda row: row[0], key=True, text=True),
        Column[tuple[str, str, str]]("", lambda row: row[1]),
        Column[tuple[str, str, str]]("follows from", lambda row: row[2], text=True),
    ]
    return table("A real fleet of these devices", columns, rows, notes)

"""Forecast of a real fleet from the predictions in a simulated run's ledger."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from edgefl.report.units import mib, quantity, seconds
from edgefl.run_records import RunReport

#: Rates that a round's time is predicted by, beside FLOPs.
_RATES = ("operation_s", "written_bytes", "down_bytes", "up_bytes")


class Forecast(NamedTuple):
    """Time, energy and bytes of a run's rounds on real devices, by its ledger's predictions. Base units.

    ``seconds``: of all rounds, each as long as its slowest device; ``slowest``: device profile -> rounds that it was
    the slowest in; ``energy_j``: of all devices; None where no speed, or no power, is known. ``payload_bytes``: both
    ways. ``untimed``: device rounds without a predicted time.
    """

    rounds: int
    seconds: float | None
    slowest: dict[str, int]
    payload_bytes: float
    energy_j: float | None
    untimed: int
    unknown: tuple[str, ...]  # fields of the profiles' speed that some device has none of, whose share is missing


def forecast(report: RunReport) -> Forecast:
    """Forecast of the run's rounds on devices of its profiles."""
    profiles = {row.device: row.profile for row in report.devices}
    rounds: dict[tuple[int, int], list[tuple[float, str]]] = defaultdict(list)
    payload = joules = 0.0
    untimed = unpowered = 0
    done = [row for row in report.assignments if row.status == "done"]
    for row in done:
        figures = {name: figure.value for name, figure in (row.predicted | row.measured).items()}
        payload += (figures.get("payload_down_bytes") or 0.0) + (figures.get("payload_up_bytes") or 0.0)
        wall, energy = (row.predicted[name].value if name in row.predicted else None for name in ("wall_s", "energy_j"))
        rounds[row.stage, row.round].append((wall or 0.0, profiles.get(row.device, "")))
        untimed += wall is None
        unpowered += energy is None
        joules += energy or 0.0
    slowest: dict[str, int] = defaultdict(int)
    for spent in rounds.values():
        slowest[max(spent)[1]] += 1
    known = bool(done) and not untimed
    seconds = sum(max(spent)[0] for spent in rounds.values()) if known else None
    power = joules if done and not unpowered else None
    trained = {row.device for row in done}
    speeds = [row.capabilities.speed for row in report.devices if row.device in trained]
    unknown = tuple(name for name in _RATES if any(not getattr(speed, name) for speed in speeds))
    return Forecast(len(rounds), seconds, dict(slowest) if known else {}, payload, power, untimed, unknown)


def sentences(found: Forecast) -> list[str]:
    """The forecast in words, for a terminal."""
    payload = (
        f"{mib(found.payload_bytes)} of parts cross the network in {found.rounds} rounds, without MQTT's own bytes."
    )
    if found.seconds is None:
        missing = "no device trained" if not found.rounds else f"{found.untimed} device rounds have no predicted time"
        way = "A device profile that has speed.flops gives one; `edgefl-agent profile` measures it."
        return [payload, f"Its time is not known: {missing}. {way}"]
    most, count = max(found.slowest.items(), key=lambda item: item[1])
    taken = f"{found.rounds} rounds take {seconds(found.seconds)}, each as long as its slowest device"
    texts = [f"{taken} ({most or 'one of no profile'} in {count} of them).", payload]
    if found.energy_j:
        texts.append(f"They take {quantity(found.energy_j, 'J')} on all devices together.")
    if found.unknown:
        fields = ", ".join(f"speed.{name}" for name in found.unknown)
        way = "`edgefl-agent profile --broker URL` on such a device measures them"
        texts.append(f"A real fleet takes longer: a profile here lacks {fields}. {way}.")
    return texts

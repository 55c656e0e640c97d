"""The hottest processor temperature the machine reports, now."""

from __future__ import annotations

from pathlib import Path

from edgefl.records import Figure

#: Zones that are no processor: a Jetson Nano's PMIC-Die always reads 100 °C; radio and battery say nothing of the load.
_NOT_PROCESSOR = ("pmic", "wifi", "battery", "bat", "nvme", "acpi")
#: hwmon chips of processors without a thermal zone.
_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
#: A disconnected sensor reads far outside this range.
_PLAUSIBLE_C = (-40.0, 150.0)


def temperature(sysfs: Path = Path("/sys")) -> Figure:
    """In °C, from thermal zones, else from hwmon; null with where was looked when there is none."""
    readings = [*_zones(sysfs), *_chips(sysfs)]
    if not readings:
        return Figure(reason=f"no temperature sensor: looked in {sysfs / 'class/thermal'} and {sysfs / 'class/hwmon'}")
    celsius, source = max(readings)
    return Figure(value=celsius, source=source)


def _zones(sysfs: Path) -> list[tuple[float, str]]:
    readings = []
    for zone in sorted((sysfs / "class/thermal").glob("thermal_zone*")):
        try:
            kind = (zone / "type").read_text().strip()
            celsius = int((zone / "temp").read_text()) / 1e3
        except (OSError, ValueError):  # zones of switched-off units refuse to be read
            continue
        if _plausible(celsius) and not any(word in kind.lower() for word in _NOT_PROCESSOR):
            readings.append((celsius, f"thermal zone {kind}"))
    return readings


def _chips(sysfs: Path) -> list[tuple[float, str]]:
    readings = []
    for chip in sorted((sysfs / "class/hwmon").glob("hwmon*")):
        try:
            name = (chip / "name").read_text().strip()
        except OSError:
            continue
        if name not in _CHIPS:
            continue
        for file in sorted(chip.glob("temp*_input")):
            try:
                celsius = int(file.read_text()) / 1e3
            except (OSError, ValueError):
                continue
            if _plausible(celsius):
                readings.append((celsius, f"hwmon {name}"))
    return readings


def _plausible(celsius: float) -> bool:
    return _PLAUSIBLE_C[0] < celsius < _PLAUSIBLE_C[1]

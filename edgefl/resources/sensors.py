"""Energy between two moments and the processor's temperature; without a sensor null and the reason, never an estimate.

Energy comes from the first of these that there is:

* ina238 and ina3221: the power monitors of Jetson boards, through sysfs; power is sampled and integrated. The source
  says what it covers: "module", by a rail that carries all of it, or "sum of rails, may be short".
* nvml: the GPU's own energy counter (whole card, nothing else of the machine). Only when the training runs on it.
* rapl: the processor packages' energy counters (not memory, not the board); usually readable by root only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

from edgefl.records import Figure
from edgefl.resources.hardware import Nvml, NvmlError

#: 100 ms: the INA3221 averages over some ms itself; slower sampling would miss short steps, faster is I2C traffic.
PERIOD_S = 0.1
#: The monitor at the input of Thor's board: all that the module takes, and the board with it.
_INPUT_CHIP = "ina238"
#: Rails that carry the whole module, of Orin Nano and NX, Xavier NX and Nano. AGX Orin and AGX Xavier have none: their
#: monitored rails are summed.
_TOTAL_RAILS = ("VDD_IN", "POM_5V_IN")
#: Zones that are no processor: a Jetson Nano's PMIC-Die always reads 100 °C; radio and battery say nothing of the load.
_NOT_PROCESSOR = ("pmic", "wifi", "battery", "bat", "nvme", "acpi")
#: hwmon chips of processors without a thermal zone.
_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
#: A disconnected sensor reads far outside this range.
_PLAUSIBLE_C = (-40.0, 150.0)


class PowerMeter:
    """Integrates a power reading over time by the trapezoid rule."""

    def __init__(self, source: str, watts: Callable[[], float]) -> None:
        self.source = source
        self.joules = 0.0
        self._watts = watts
        self._last: tuple[float, float] | None = None

    def tick(self, now: float) -> None:
        """One more reading, at monotonic time ``now``. Raises OSError, ValueError or NvmlError on a silent sensor."""
        power = self._watts()
        if self._last is not None:
            then, before = self._last
            self.joules += (now - then) * (power + before) / 2
        self._last = (now, power)


class CounterMeter:
    """Adds up differences of energy counters, each given with the value after which it starts again (0: never)."""

    def __init__(self, source: str, counters: list[tuple[Callable[[], float], float]]) -> None:
        self.source = source
        self.joules = 0.0
        self._counters = counters
        self._last: list[float] | None = None

    def tick(self, now: float) -> None:
        """As ``PowerMeter.tick``; at least once per wrap (a RAPL counter wraps after some minutes at full load)."""
        values = [read() for read, _ in self._counters]
        if self._last is not None:
            for value, before, (_, wraps_at) in zip(values, self._last, self._counters, strict=True):
                self.joules += value - before + (wraps_at if value < before else 0.0)
        self._last = values


Meter = PowerMeter | CounterMeter


class EnergyProbe:
    """Context manager; afterwards ``figure()`` is the energy spent inside it, in joules, with its source.

    ``sysfs`` is the root of sysfs; ``device`` is where the training runs ("cpu", "cuda").
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        sysfs: Path = Path("/sys"),
        nvml: Callable[[], Nvml] = Nvml,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._looked: list[str] = []
        self._meter = self._find(device, sysfs, nvml)
        self._period_s = period_s
        self._clock = clock
        self._fault = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="energy", daemon=True)

    def __enter__(self) -> EnergyProbe:
        self._tick()
        if self._meter is not None and not self._fault:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._tick()

    def figure(self) -> Figure:
        """Energy since entering, or null with the reason."""
        if self._meter is None:
            return Figure(reason="no energy sensor: looked for " + "; ".join(self._looked))
        if self._fault:
            return Figure(source=self._meter.source, reason=self._fault)
        return Figure(value=self._meter.joules, source=self._meter.source)

    def _find(self, device: str, sysfs: Path, nvml: Callable[[], Nvml]) -> Meter | None:
        if (module := _module(sysfs)) is not None:
            return module
        self._looked.append(f"ina3221 and ina238 in {sysfs / 'class/hwmon'}")
        if device.startswith("cuda"):
            try:
                return _nvml_meter(nvml())
            except NvmlError as error:
                self._looked.append(f"nvml ({error})")
        else:
            self._looked.append("nvml (the training does not run on a GPU)")
        try:
            packages = _rapl(sysfs)
            self._looked.append(f"rapl in {sysfs / 'class/powercap'}")
        except PermissionError as error:
            self._looked.append(f"rapl ({error.filename} is readable by root only)")
            return None
        return packages

    def _sample(self) -> None:
        while not self._fault and not self._stop.wait(self._period_s):
            self._tick()

    def _tick(self) -> None:
        if self._meter is None or self._fault:
            return
        try:
            self._meter.tick(self._clock())
        except (OSError, ValueError, NvmlError) as error:
            self._fault = f"{self._meter.source} stopped answering: {error}"


def _module(sysfs: Path) -> Meter | None:
    """Power of a Jetson's module: of the rail that carries it all, else of the monitored rails; None without any."""
    rails = dict(_rails(sysfs))
    if not rails:
        return None
    totals = [rail for rail in rails if rail[0] == _INPUT_CHIP]
    totals += [rail for name in _TOTAL_RAILS for rail in rails if rail[1] == name]
    chosen = totals[:1] or sorted(rails)
    covers = "module" if totals else "sum of rails, may be short"
    chips = "/".join(sorted({chip for chip, _ in chosen}))
    return PowerMeter(
        f"{chips}: {' + '.join(name for _, name in chosen)} ({covers})", lambda: sum(rails[rail]() for rail in chosen)
    )


def _rails(sysfs: Path) -> Iterator[tuple[tuple[str, str], Callable[[], float]]]:
    """((chip, rail), its watts) of each rail that a power monitor of a Jetson measures."""
    for chip in sorted((sysfs / "class/hwmon").glob("hwmon*")):
        kind = _text(chip / "name")
        if kind == _INPUT_CHIP and _text(chip / "power1_input"):  # its one channel
            yield (
                (kind, _text(chip / "label") or _text(chip / "in1_label") or "VIN"),
                partial(_watts, chip / "power1_input", 1e6),
            )
        for channel in (1, 2, 3) if kind == "ina3221" else ():  # higher numbers are shunt voltages and sums of these
            label = _text(chip / f"in{channel}_label")
            volts, amperes = chip / f"in{channel}_input", chip / f"curr{channel}_input"
            if label in ("", "NC") or _text(chip / f"in{channel}_enable") == "0":
                continue
            if _text(volts) and _text(amperes):
                yield (kind, label), partial(_product, volts, amperes)
    for chip in sorted((sysfs / "bus/iio/devices").glob("iio:device*")):  # L4T 32
        for channel in (0, 1, 2) if _text(chip / "name").startswith("ina3221") else ():
            power = chip / f"in_power{channel}_input"
            if (label := _text(chip / f"rail_name_{channel}")) and _text(power):
                yield ("ina3221", label), partial(_watts, power, 1e3)


def _watts(file: Path, per_watt: float) -> float:
    return int(file.read_text()) / per_watt


def _product(volts: Path, amperes: Path) -> float:
    return int(volts.read_text()) * int(amperes.read_text()) / 1e6  # mV * mA = uW


def _nvml_meter(gpu: Nvml) -> Meter:
    """The card's energy counter, or its power where the counter is missing. Raises NvmlError when it has neither."""
    try:
        gpu.energy_j()
    except NvmlError:
        gpu.power_w()
        return PowerMeter("nvml: power of the card", gpu.power_w)
    return CounterMeter("nvml: energy counter of the card", [(gpu.energy_j, 0.0)])


def _rapl(sysfs: Path) -> Meter | None:
    """The processor packages' counters; None when there are none. Raises PermissionError when they cannot be read."""
    counters: list[tuple[Callable[[], float], float]] = []
    names = []
    for zone in sorted((sysfs / "class/powercap").glob("intel-rapl:*")):  # AMD processors appear under this name too
        name, file = _text(zone / "name"), zone / "energy_uj"
        if not name.startswith("package") or zone.name.count(":") != 1:  # "x:0:1" is a share of "x:0"
            continue
        file.read_text()
        wraps_at = int(_text(zone / "max_energy_range_uj") or 0) / 1e6
        counters.append((partial(_joules, file), wraps_at))
        names.append(name)
    return CounterMeter("rapl: " + " + ".join(names), counters) if counters else None


def _joules(file: Path) -> float:
    return int(file.read_text()) / 1e6


def temperature(sysfs: Path = Path("/sys")) -> Figure:
    """The hottest processor temperature now, in °C, from thermal zones and hwmon; null when there is no sensor."""
    readings = list(_temperatures(sysfs))
    if not readings:
        return Figure(reason=f"no temperature sensor: looked in {sysfs / 'class/thermal'} and {sysfs / 'class/hwmon'}")
    celsius, source = max(readings)
    return Figure(value=celsius, source=source)


def _temperatures(sysfs: Path) -> Iterator[tuple[float, str]]:
    """(°C, name) of each sensor of a processor that reads something plausible."""
    files: list[tuple[Path, str]] = []
    for zone in (sysfs / "class/thermal").glob("thermal_zone*"):
        kind = _text(zone / "type")
        if kind and not any(word in kind.lower() for word in _NOT_PROCESSOR):
            files.append((zone / "temp", f"thermal zone {kind}"))
    for chip in (sysfs / "class/hwmon").glob("hwmon*"):
        if (name := _text(chip / "name")) in _CHIPS:
            files += [(file, f"hwmon {name}") for file in chip.glob("temp*_input")]
    for file, source in files:
        try:
            celsius = int(_text(file)) / 1e3
        except ValueError:  # zones of switched-off units refuse to be read
            continue
        if _PLAUSIBLE_C[0] < celsius < _PLAUSIBLE_C[1]:
            yield celsius, source


def _text(file: Path) -> str:
    """Contents of a small file without the line end; "" when it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""

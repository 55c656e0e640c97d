"""Sysfs trees of Jetson boards, made from what their documentation and users' listings show; none from a board here."""

from __future__ import annotations

Files = dict[str, object]
Rail = tuple[str, int, int]  # label, mV, mA


def ina3221(number: int, *rails: Rail) -> Files:
    """A power monitor of three channels; those that are left over are not connected."""
    chip = f"class/hwmon/hwmon{number}"
    files: Files = {f"{chip}/name": "ina3221", f"{chip}/in7_label": "sum of shunt voltages", f"{chip}/in7_input": 900}
    for channel, (label, volts, amperes) in enumerate([*rails, *[("NC", 5000, 1)] * 3][:3], 1):
        files |= {f"{chip}/in{channel}_label": label, f"{chip}/in{channel}_enable": 1}
        files |= {f"{chip}/in{channel}_input": volts, f"{chip}/curr{channel}_input": amperes}
    return files


def ina238(number: int, volts: int, amperes: int) -> Files:
    """The monitor at the input of Thor's board: shunt, bus, current and power, without a label."""
    chip = f"class/hwmon/hwmon{number}"
    values = {"in0_input": 12, "in1_input": volts, "curr1_input": amperes, "power1_input": volts * amperes}
    return {f"{chip}/name": "ina238", **{f"{chip}/{name}": value for name, value in values.items()}}


def ina3221x(*rails: Rail) -> Files:
    """The monitor as L4T 32 shows it, in iio; powers in mW."""
    chip = "bus/iio/devices/iio:device0"
    files: Files = {f"{chip}/name": "ina3221x"}
    for channel, (label, volts, amperes) in enumerate(rails):
        files |= {f"{chip}/rail_name_{channel}": label, f"{chip}/in_power{channel}_input": volts * amperes // 1000}
    return files


#: board -> (its tree, its source, watts).
BOARDS: dict[str, tuple[Files, str, float]] = {
    "Nano, L4T 32": (
        ina3221x(("POM_5V_IN", 5000, 500), ("POM_5V_GPU", 5000, 40), ("POM_5V_CPU", 5000, 160)),
        "ina3221: POM_5V_IN (module)",
        2.5,
    ),
    "Xavier NX, L4T 35": (
        ina3221(2, ("VDD_IN", 5000, 1000), ("VDD_CPU_GPU_CV", 5000, 240), ("VDD_SOC", 5000, 200)),
        "ina3221: VDD_IN (module)",
        5.0,
    ),
    "AGX Xavier, L4T 35": (
        ina3221(2, ("GPU", 19000, 200), ("CPU", 19000, 100), ("SOC", 19000, 150))
        | ina3221(3, ("CV", 19000, 10), ("VDDRQ", 19000, 50), ("SYS5V", 5000, 1140)),
        "ina3221: CPU + CV + GPU + SOC + SYS5V + VDDRQ (sum of rails, may be short)",
        15.39,
    ),
    "Orin Nano, L4T 36": (
        ina3221(1, ("VDD_IN", 5000, 1400), ("VDD_CPU_GPU_CV", 5000, 300), ("VDD_SOC", 5000, 290)),
        "ina3221: VDD_IN (module)",
        7.0,
    ),
    "AGX Orin, L4T 36": (
        ina3221(3, ("VDD_GPU_SOC", 20000, 150), ("VDD_CPU_CV", 20000, 50), ("VIN_SYS_5V0", 5000, 750))
        | ina3221(4, ("NC", 5000, 1), ("VDDQ_VDD2_1V8AO", 5000, 500)),
        "ina3221: VDDQ_VDD2_1V8AO + VDD_CPU_CV + VDD_GPU_SOC + VIN_SYS_5V0 (sum of rails, may be short)",
        10.25,
    ),
    "Thor, L4T 38": (
        ina3221(1, ("VDD_GPU", 20000, 600), ("VDD_CPU_SOC_MSS", 20000, 590), ("VIN_SYS_5V0", 5000, 1000))
        | ina238(2, 20000, 2500),
        "ina238: VIN (module)",
        50.0,
    ),
}

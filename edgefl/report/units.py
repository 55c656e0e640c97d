"""Numbers as text in printed units: MiB, GFLOP, seconds. Units are chosen here, so that a column has one unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from edgefl.patterns import is_pattern_key

MIB = 2**20
GIGA = 1e9
#: Units of things that are counted: without decimals.
COUNTED = frozenset({"samples", "rounds", "updates", "classes", "version"})
#: In place of a missing number.
NOTHING = "—"

#: Unit of the ledger -> (unit printed, divisor).
PRINTED: dict[str, tuple[str, float]] = {"B": ("MiB", MIB), "FLOP": ("GFLOP", GIGA)}


def number(value: float | None) -> str:
    """Three significant digits, never an exponent between 0.001 and 10^15: 0.0123, 1.23, 12.3, 1,234. None: a dash."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 1e-3:
        return f"{value:.2e}"
    rounded = float(f"{size:.3g}")  # 0.9996 is 1.00, not 1.000
    decimals = max(0, 2 - math.floor(math.log10(rounded)))
    return f"{value:,.{decimals}f}"


def printed_unit(unit: str) -> str:
    """The unit a figure of ``unit`` is printed in: B -> MiB, FLOP -> GFLOP, else itself."""
    return PRINTED.get(unit, (unit, 1.0))[0]


def scaled(value: float, unit: str) -> float:
    """``value`` (in ``unit``) in its printed unit."""
    return value / PRINTED.get(unit, (unit, 1.0))[1]


def quantity(value: float | None, unit: str) -> str:
    """Number and printed unit: ``quantity(2**21, "B") == "2.00 MiB"``; None is a dash."""
    if value is None:
        return NOTHING
    if unit in COUNTED:
        return f"{value:,.0f} {unit}"
    return f"{number(scaled(value, unit))} {printed_unit(unit)}".rstrip()


def mib(value: float | None) -> str:
    """Bytes as MiB, with the unit."""
    return quantity(value, "B")


def gflop(value: float | None) -> str:
    """FLOPs as GFLOP, with the unit."""
    return quantity(value, "FLOP")


def seconds(value: float | None) -> str:
    """A duration: 0.42 s, 12.3 s, 2 min 05 s, 3 h 07 min."""
    if value is None:
        return NOTHING
    if value < 60:
        return f"{number(round(value, 3))} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def whole_seconds(value: float | None) -> str:
    """A duration without parts of a second: 4 s, 2 min 05 s."""
    return f"{round(value)} s" if value is not None and round(value) < 60 else seconds(value)


def ago(seconds: float) -> str:
    """A past time in one unit: just now, 12 min ago, 3 h ago, 5 days ago."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and unit != "days"):
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def percent(share: float) -> str:
    """A share of one as percent with one decimal: 0.9423 -> 94.2 %."""
    return f"{100 * share:.1f} %"


#: Metrics that do not spell their names.
_NAMES = {
    "r2": "R²",
    "mae": "mean absolute error",
    "rmse": "root mean square error",
    "macro_f1": "macro F1",
    "macro_auroc": "macro AUROC",
    "top5_accuracy": "top-5 accuracy",
}


def is_share(metric: str) -> bool:
    """True for a metric that is a share of one, printed as percent."""
    return (
        metric.startswith(("accuracy", "mean_average", "macro_", "recall", "precision", "f1", "top"))
        or "_recall_at_" in metric
    )


def is_leading(metric: str) -> bool:
    """True for a metric shown live; others are in the report alone."""
    return metric in {"accuracy", "r2", "mean_average_precision", "loss", "rsum"} or metric.endswith("recall_at_1")


def score(metric: str, value: float) -> str:
    """A metric's value in a sentence: with the percent sign of a share."""
    return percent(value) if is_share(metric) else number(value)


def metric_words(metric: str) -> str:
    """A metric in words: "recall at 1 (acc to gyro)" of ``acc_to_gyro_recall_at_1``, "macro F1" of ``macro_f1``."""
    if metric in _NAMES:
        return _NAMES[metric]
    pair, _, at = metric.partition("_recall_at_")
    return f"recall at {at} ({pair.replace('_', ' ')})" if at else metric.replace("_", " ")


def samples(counts: Mapping[str, int], noun: str = "") -> str:
    """{"": 40, "acc": 40, "gyro": 31} -> "40 (acc 40, gyro 31)"; ``noun`` follows the whole."""
    parts = ", ".join(f"{name} {number:,}" for name, number in counts.items() if name and not is_pattern_key(name))
    whole = f"{counts[''] if '' in counts else max(counts.values(), default=0):,}{noun}"
    return f"{whole} ({parts})" if parts else whole


def moment(at: float | None) -> str:
    """Seconds since the epoch as local date and time."""
    if not at:
        return NOTHING
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def privacy(account: Mapping[str, float]) -> str:
    """ "epsilon 2.31 of 8 (delta 1e-05)", of a round's account; ", 41 towards the server" where that is not trusted."""
    towards = f", {account['server']:.3g} towards the server" if "server" in account else ""
    return f"epsilon {account['epsilon']:.3g} of {account['budget']:g} (delta {account['delta']:g}){towards}"


def spans(values: Iterable[int]) -> str:
    """Whole numbers as ranges: [1, 2, 3, 5] -> 1–3, 5."""
    ranges: list[tuple[int, int]] = []
    for value in sorted(set(values)):
        adjacent = ranges and ranges[-1][1] == value - 1
        ranges.append((ranges.pop()[0] if adjacent else value, value))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges)


def public_url(text: str) -> str:
    """``text`` with user name and password cut out of any URL: mqtt://a:b@host -> mqtt://host."""
    return re.sub(r"(\w[\w+.-]*://)[^/@\s]+@", r"\1", text)


def stage_words(numbers: Sequence[int]) -> str:
    """ "embeddings + stages 1–6" of [0, 1, 2, 3, 4, 5, 6]; "heads alone" of none."""
    names = ["embeddings"] if 0 in numbers else []
    if stages := [n for n in numbers if n]:
        names.append(f"stage{'s' * (len(stages) > 1)} {spans(stages)}")
    return " + ".join(names) or "heads alone"

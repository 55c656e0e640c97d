"""docs/results/prediction_fuzz.md: shares of random runs whose predictions held, figure by figure, and the worst."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.cost import prediction_fuzz
from benchmarks.cost.prediction_fuzz import Outcome, Row, overruns

MIB = 2**20
#: Rows of the worst that are shown.
WORST = 10


class Bound(NamedTuple):
    """A figure's claim: ``share`` off at most, or ``floor`` off in its unit. ``scale``: of what is printed."""

    title: str
    share: float
    floor: float
    scale: float
    unit: str
    pair: Callable[[Outcome, str, Sequence[Row]], tuple[float, float] | None]


class Compared(NamedTuple):
    """One device of one run: predicted and measured."""

    one: Outcome
    device: str
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def _of(name: str, total: Callable[[Iterable[float]], float]) -> Callable[..., tuple[float, float] | None]:
    def pair(one: Outcome, device: str, rows: Sequence[Row]) -> tuple[float, float] | None:
        both = [[figures.get(name) for figures in (row.predicted, row.measured)] for row in rows]
        if any(value is None for values in both for value in values):
            return None
        predicted, measured = (total(values) for values in zip(*both, strict=True))
        return (predicted, measured) if measured else None

    return pair


def _process(one: Outcome, device: str, rows: Sequence[Row]) -> tuple[float, float] | None:
    found = _of("step_peak_bytes", max)(one, device, rows)
    peak = max((row.measured.get("process_peak_bytes", 0.0) for row in rows), default=0.0)
    return (found[0] + one.base[device], peak) if found and peak else None


def _received(one: Outcome, device: str, rows: Sequence[Row]) -> tuple[float, float] | None:
    """None for a device that trained alone in some round: the aggregate is its own update, which it has."""
    trained = [(row.stage, row.round) for row in one.rows if row.status == "done"]
    alone = any(trained.count((row.stage, row.round)) == 1 for row in rows)
    return None if alone else _of("payload_down_bytes", sum)(one, device, rows)


BOUNDS = (
    Bound("memory of the whole trainer", 0.10, 0, MIB, "MiB", _process),
    Bound("memory above the idle trainer", 0.10, 0, MIB, "MiB", _of("step_peak_bytes", max)),
    Bound("the same, or 4 MiB off", 0.10, 4 * MIB, MIB, "MiB", _of("step_peak_bytes", max)),
    Bound("FLOPs", 0.02, 0, 1e9, "GFLOP", _of("flops", sum)),
    Bound("bytes received", 0.02, 0, 1024, "KiB", _received),
    Bound("bytes sent", 0.02, 0, 1024, "KiB", _of("payload_up_bytes", sum)),
    Bound("seconds of steps", 0.25, 0, 1, "s", _of("compute_s", sum)),
)


def compared(every: Sequence[Outcome], bound: Bound) -> list[Compared]:
    """All devices that the figure is known of."""
    pairs = ((one, device, bound.pair(one, device, rows)) for one in every for device, rows in one.trained())
    return [Compared(one, device, *pair) for one, device, pair in pairs if pair is not None]


def within(found: Compared, bound: Bound) -> bool:
    """True for a prediction inside its bound."""
    return abs(found.predicted - found.measured) <= max(bound.share * found.measured, bound.floor)


def _packed(one: Outcome) -> bool:
    return any(way != "f32" for way in one.traits["transfer"].values())


def _table(every: Sequence[Outcome]) -> Iterator[str]:
    yield "| figure | bound | devices | within | median error | most above the prediction |"
    yield "|---|---|---|---|---|---|"
    plain = [one for one in every if not _packed(one)]
    rows = [(bound.title, every, bound) for bound in BOUNDS]
    rows += [(f"{bound.title}, nothing packed", plain, bound) for bound in BOUNDS if bound.unit == "KiB"]
    for title, of, bound in rows:
        found = compared(of, bound)
        if not found:
            continue
        good = sum(within(one, bound) for one in found)
        middle = sorted(one.off for one in found)[len(found) // 2]
        most = max(one.measured / one.predicted for one in found if one.predicted)
        floor = f" or {bound.floor / bound.scale:.0f} {bound.unit}" if bound.floor else ""
        share = f"{good / len(found):.0%}"
        yield f"| {title} | ± {bound.share:.0%}{floor} | {len(found)} | {share} | {middle:+.1%} | {most:.2f} × |"


def _worst(every: Sequence[Outcome], bound: Bound) -> Iterator[str]:
    found = [one for one in compared(every, bound) if not within(one, bound)]
    if not found:
        return
    yield f"### {bound.title[0].upper()}{bound.title[1:]}\n"
    yield f"| seed | device | predicted, {bound.unit} | measured | error | run |"
    yield "|---|---|---|---|---|---|"
    for one in sorted(found, key=lambda one: -abs(one.off))[:WORST]:
        numbers = [f"{value / bound.scale:,.2f}" for value in (one.predicted, one.measured)]
        yield f"| {one.one.seed} | {one.device} | {' | '.join(numbers)} | {one.off:+.0%} | {_told(one.one)} |"
    yield ""


def _told(one: Outcome) -> str:
    t = one.traits
    slots = ", ".join(f"{role} {choice}" for role, choice in t["slots"].items())
    told = [t["recipe"], slots, t["encoders"], f"batch {t['batch_size']}", t["optimizer"], f"cache {t['cache']}"]
    told += [f"LoRA {t['lora']}"] if t["lora"] else []
    told += [f"up {t['transfer']['up']}, down {t['transfer']['down']}"] if _packed(one) else []
    told += [f"hold-out {t['holdout']}"] if t["holdout"] else []
    return "; ".join(filter(None, [*told, f"{t['samples']['']} samples"]))


def _budgets(every: Sequence[Outcome]) -> str:
    over = [(one.seed, *found) for one in every for found in overruns(one)]
    held = [name for one in every for name, budget in one.budgets.items() if budget != type(budget)()]
    refused = {(one.seed, row.device, row.refusal.reason) for one in every for row in one.rows if row.refusal}
    stopped = sorted(seed for seed, _, reason in refused if reason == "ceiling")
    text = (
        f"{len(held)} devices had budgets at 0.5 to 1.3 times what they were predicted to take; "
        f"{len({(seed, device) for seed, device, _ in refused})} were refused, {len(stopped)} of them by their ceiling "
        f"in the middle of a round (seeds {', '.join(map(str, stopped)) or 'none'}). "
        f"Accepted rounds that took more than their budget: **{len(over)}**."
    )
    lines = [f"* seed {seed}, {device}, stage {s}, round {r}: {field} {value:,.0f} of {allowed:,.0f}"
             for seed, device, s, r, field, value, allowed in over]  # fmt: skip
    return "\n".join([text, *lines])


def summary(every: Sequence[Outcome]) -> str:
    """Text for the terminal: shares, then the worst of each figure."""
    lines = [*_table(every), "", _budgets(every), ""]
    for bound in BOUNDS:
        lines += _worst(every, bound)
    failed = [f"* seed {one.seed}: {one.error}" for one in every if one.error]
    return "\n".join([*lines, *(["Runs that did not end well:", *failed] if failed else [])]) + "\n"


def page(every: Sequence[Outcome]) -> str:
    """Markdown."""
    share = {bound.title: sum(within(one, bound) for one in found) / len(found)
             for bound in BOUNDS if (found := compared(every, bound))}  # fmt: skip
    plain = [one for one in every if not _packed(one)]
    sent = [one for bound in BOUNDS if bound.unit == "KiB" for one in compared(plain, bound)]
    whole = sum(abs(one.off) <= 0.02 for one in sent) / max(1, len(sent))
    over = sum(len(overruns(one)) for one in every)
    first = (
        f"Of {len(every)} random runs **{over} accepted rounds exceeded a budget**; FLOPs are within 2 % of the "
        f"prediction on {share['FLOPs']:.0%} of the devices, bytes of parts that are not packed on {whole:.0%}."
    )
    if "memory of the whole trainer" in share:
        names = ("memory of the whole trainer", "memory above the idle trainer", "the same, or 4 MiB off")
        whole_trainer, step, near = (share[name] for name in names)
        first += (
            f" The whole trainer's memory is within 10 % on {whole_trainer:.0%}, what a step adds to the idle one "
            f"within 10 % on {step:.0%}, within 10 % or 4 MiB on {near:.0%}."
        )
    if "seconds of steps" in share:
        first += f" Seconds of steps are within 25 % on {share['seconds of steps']:.0%}."
    about = (prediction_fuzz.__doc__ or "").split("\n\n")[1]
    lines = ["# Predictions of random runs", "", first, "", *_table(every), "", "## Budgets", "", _budgets(every), ""]
    if not compared(every, BOUNDS[-1]):
        lines += ["Seconds are not judged: other programs ran on the machine meanwhile (`--busy`).", ""]
    alone = (
        "Bytes received are those of devices that never trained alone: the aggregate is then the device's own update."
    )
    lines += [about, "", alone, "", "Made by `python -m benchmarks.cost.prediction_fuzz --write docs/results`.", ""]
    lines += ["## The worst", ""]
    for bound in BOUNDS:
        lines += _worst(every, bound)
    return "\n".join(lines).rstrip() + "\n"

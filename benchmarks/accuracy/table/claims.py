"""What the papers claim, and whether it holds here: each claim compares two methods, or two masks, on a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.accuracy.table import measures
from benchmarks.accuracy.table.collect import Outcome
from benchmarks.accuracy.table.measures import Measure

#: (task, method, missing rate) -> its finished runs, one a seed
Rows = Callable[[str, str, float], Sequence[Outcome]]


class Comparison(NamedTuple):
    """One line of evidence: "left" has to be above "right" by more than ``margin`` (below: ``lower``)."""

    task: str
    rate: float
    what: str
    left: str
    right: str
    measure: Measure
    margin: float = 0.0
    lower: bool = False
    right_measure: Measure | None = None
    falling: bool = False  # of each, what it loses from the lowest missing rate to this one


class Finding(NamedTuple):
    """A comparison with its figures. ``gain``: by how much it holds, paired by seed; None: runs are missing."""

    comparison: Comparison
    left: measures.Summary | None
    right: measures.Summary | None
    gain: measures.Interval | None = None

    @property
    def verdict(self) -> str:
        """ "yes" or "no" where the interval of 95 % leaves out zero, else "undecided"; "" without runs."""
        if self.gain is None:
            return ""
        return "yes" if self.gain.low > 0 else "no" if self.gain.high < 0 else "undecided"


class Claim(NamedTuple):
    """A paper's claim and the comparisons that test it: yes when all are, no when one is. ``key``: of its notes."""

    key: str
    system: str
    text: str
    comparisons: tuple[Comparison, ...]


_TASKS = ("har", "av", "emoji")
_RATES = (0.2, 0.5)
_LOST = "lost from 20 % to 50 % missing: accuracy, "
_RECALL = "RSum / 6, known concepts"


def claims() -> tuple[Claim, ...]:
    """All of them."""
    return (
        _layerwise(),
        _cheaper(),
        _progressive(),
        _masks(),
        _one_modality(),
        _mixed(),
        _slower_loss(),
        _missing_sensors(),
    )


def judge(claim: Claim, rows: Rows) -> list[Finding]:
    """Each comparison with its figures."""
    return [_judged(asked, rows) for asked in claim.comparisons]


def _judged(asked: Comparison, rows: Rows) -> Finding:
    left = _values(asked, asked.left, asked.measure, rows)
    right = _values(asked, asked.right, asked.right_measure or asked.measure, rows)
    shared = sorted(set(left) & set(right))
    gains = [right[s] - left[s] if asked.lower else left[s] - right[s] - asked.margin for s in shared]
    sides = [measures.over(side[seed] for seed in shared) for side in (left, right)]
    return Finding(asked, sides[0], sides[1], measures.interval(gains))


def _values(asked: Comparison, method: str, measure: Measure, rows: Rows) -> dict[int, float]:
    """Seed -> the number that is compared."""
    found = measures.by_seed(rows(asked.task, method, asked.rate), measure)
    if not asked.falling:
        return found
    before = measures.by_seed(rows(asked.task, method, _RATES[0]), measure)
    return {seed: before[seed] - value for seed, value in found.items() if seed in before}


def _layerwise() -> Claim:
    text = "layer-wise training stays within 2 points of end-to-end training"
    lines = [
        Comparison(task, rate, "accuracy, all modalities", "lw-fedmml", "fedavg", measures.complete, margin=-2.0)
        for task in _TASKS
        for rate in _RATES
    ]
    lines += [
        Comparison("emoji_retrieval", rate, _RECALL, "clip-lw", "clip-fedavg", _mean_recall, margin=-2.0)
        for rate in _RATES
    ]
    return Claim("layerwise", "LW-FedMML", text, tuple(lines))


def _cheaper() -> Claim:
    figures: dict[str, Measure] = {
        "step memory, MiB": measures.step_mib,
        "GFLOP": measures.gflop,
        "payload, MiB": measures.payload_mib,
    }
    lines = [
        Comparison(task, 0.5, name, "lw-fedmml", "fedavg", measure, lower=True)
        for task in _TASKS
        for name, measure in figures.items()
    ]
    return Claim("cheaper", "LW-FedMML", "at lower memory, FLOPs and bytes", tuple(lines))


def _progressive() -> Claim:
    lines = [
        Comparison(task, rate, "accuracy, all modalities", "prog-fedmml", "fedavg", measures.complete)
        for task in _TASKS
        for rate in _RATES
    ]
    lines += [Comparison("emoji_retrieval", rate, _RECALL, "clip-prog", "clip-fedavg", _mean_recall) for rate in _RATES]
    return Claim("progressive", "Prog-FedMML", "progressive training is at or above end-to-end training", tuple(lines))


def _masks() -> Claim:
    lines = [
        Comparison(task, 0.5, "accuracy, as trained", "pmcmfl", f"multiway-{mask}", measures.as_trained)
        for task in _TASKS
        for mask in ("zero", "gaussian", "ignore")
    ]
    return Claim(
        "masks", "PmcmFL", "at 50 % missing, prototypes are above zeros, Gaussian noise and ignoring", tuple(lines)
    )


def _one_modality() -> Claim:
    lines = [
        Comparison(
            task,
            0.5,
            "accuracy, one modality; classifier matching against zeros, by more than 5 points",
            "pmcmfl",
            "pmcmfl",
            partial(measures.alone, mask="prototype"),
            margin=5.0,
            right_measure=partial(measures.alone, mask="zero"),
        )
        for task in _TASKS
    ]
    return Claim("one_modality", "PmcmFL", "with one modality, classifier matching is far above zeros", tuple(lines))


def _mixed() -> Claim:
    lines = [
        Comparison("emoji_mixed", rate, what, "mixed-apromfl", other, measure)
        for rate in _RATES
        for what, measure in (
            ("own accuracy", measures.own_accuracy),
            ("own recall at 1", measures.own_recall),
        )
        for other in ("mixed-fedavg", "mixed-local")
    ]
    return Claim("mixed", "AproMFL", "in a mixed fleet, both tasks are better than with FedAvg and alone", tuple(lines))


def _slower_loss() -> Claim:
    lines = [
        Comparison(task, 0.5, _LOST + what, "fedmvp", other, measure, lower=True, falling=True)
        for task in _TASKS
        for what, measure in (("all modalities", measures.complete), ("as trained", measures.as_trained))
        for other in ("fedavg", "joint-fedavg")
    ]
    return Claim(
        "missing_rate", "FedMVP", "accuracy falls more slowly with the missing rate than with FedAvg", tuple(lines)
    )


def _missing_sensors() -> Claim:
    lines = [
        Comparison("har", rate, "accuracy, all modalities", method, "fedadagrad", measures.complete)
        for rate in _RATES
        for method in ("mmic", "mmic-reconstruction", "mmic-gmc")
    ]
    return Claim("missing_sensors", "MMiC", "on har_hapt under missing sensors, better than FedAdagrad", tuple(lines))


def _mean_recall(row: Outcome) -> float | None:
    total = measures.known_rsum(row)
    return None if total is None else total / 6

"""ProtoMix's k, chosen on the devices' hold-outs.

PmcmFL, arXiv 2312.13508: "we attempt all possible values for k".

k = argmax_k sum_n R_n(k), of equal ones the smallest.  R_n(k): right answers of the received model to the held-out
samples of device n, each modality alone and the absent ones mixed from the k best prototypes. The paper compares on
its test set; a choice made there would make the test's own figure too good.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from edgefl.plan.job import Hyper, Slot
from edgefl.plan.stages import compared_k
from edgefl.plan.training_samples import held_out
from edgefl.registry import chosen

#: Metrics of an update: R_n by k, and how many answers each counts among.
RIGHT, JUDGED = "received_right_with_k_", "received_judged_with_k"


class Counts(NamedTuple):
    """Right answers by k, among ``judged`` answers for each."""

    judged: int
    right: Mapping[int, int]

    @property
    def best(self) -> int:
        """The k with the most right answers; of equal ones the smallest."""
        return min(self.right, key=lambda k: (-self.right[k], k))


def candidates(prototypes: Slot, classes: int) -> tuple[int, ...]:
    """Values of k to compare on devices, ascending, all classes among them; () for a fixed k."""
    ks = compared_k(chosen("prototypes", prototypes)[0])
    return (*(k for k in ks if k < classes), classes) if ks else ()


def counts_of(metrics: Mapping[str, float]) -> Counts | None:
    """The counts in an update's metrics, already checked by ``doubt``; None without any."""
    if JUDGED not in metrics:
        return None
    right = {int(name.removeprefix(RIGHT)): int(n) for name, n in metrics.items() if name.startswith(RIGHT)}
    return Counts(int(metrics[JUDGED]), right)


def without_counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without counts."""
    return {name: value for name, value in metrics.items() if not _is_count(name)}


def doubt(metrics: Mapping[str, float], ks: Sequence[int], most: int) -> str:
    """Contradiction in an update's counts for ``ks``, of at most ``most`` judged answers; "" for none."""
    counts = {name: value for name, value in metrics.items() if _is_count(name)}
    if not counts:
        return ""
    wanted = {JUDGED, *(f"{RIGHT}{k}" for k in ks)} if ks else set()
    if counts.keys() != wanted:
        return f"{len(counts)} counts, asked for were {len(wanted)}" + (f", of k = {_listed(ks)}" if ks else "")
    if any(value != int(value) or value < 0 for value in counts.values()):
        return "they are not all whole numbers from 0 up"
    judged = counts[JUDGED]
    if judged > most:
        return f"{judged:.0f} held-out samples judged, it has {most} at most"
    if (right := max(counts[f"{RIGHT}{k}"] for k in ks)) > judged:
        return f"right on {right:.0f} of {judged:.0f} held-out samples"
    return ""


def most_judged(hyper: Hyper, samples: Mapping[str, int], modalities: Iterable[str]) -> int:
    """Largest plausible ``judged`` of a device with ``samples`` (modality -> number with it, "" -> all)."""
    held = held_out(hyper, samples.get("", 0))
    return sum(min(held, samples.get(m, 0)) for m in modalities)


def summed(counts: Iterable[Counts]) -> Counts | None:
    """The counts of several devices as one; None where nothing was judged.

    No device counts for more than twice the (upper) median of what they judged.
    """
    judged, right, every = 0, dict[int, int](), list(counts)
    most = 2 * statistics.median_high([one.judged for one in every]) if every else 0
    for one in every:
        share = min(1.0, most / one.judged) if one.judged else 1.0
        judged += int(one.judged * share)
        for k, n in one.right.items():
            right[k] = right.get(k, 0) + int(n * share)
    return Counts(judged, right) if judged else None


def recorded(counts: Counts, devices: Sequence[str]) -> dict[str, object]:
    """A choice as plain values: k, right answers by candidate, number judged, devices."""
    right = {str(k): n for k, n in sorted(counts.right.items())}
    return {"k": counts.best, "right": right, "judged": counts.judged, "devices": list(devices)}


def in_words(record: Mapping[str, object]) -> str:
    """ "k = 5 of 1, 2, 3, 5, 6: right on 412 of 520 held-out samples", of a ``recorded`` choice."""
    k, right = record.get("k"), record.get("right")
    counts = right if isinstance(right, Mapping) else {}
    hits = counts.get(str(k), 0)
    return f"k = {k} of {_listed(counts)}: right on {hits} of {record.get('judged', 0)} held-out samples"


def _listed(ks: Iterable[object]) -> str:
    return ", ".join(map(str, ks))


def _is_count(name: str) -> bool:
    return name == JUDGED or name.startswith(RIGHT)

"""Robust combination against poisoned updates: final accuracy, and who was rejected, clipped or in quarantine.

Four activities by two sensors (basic_motions, real recordings, window 50, step 5), shared out at random among the
devices; model and rounds of benchmarks/crash/poisoned.py with layer norm in every row, evaluated after each round. One
of five devices attacks, or two of ten, in every round, as a device agent whose trainer lies. *Flip*: it sends its
change times -1; *x -10*, *x -50*: flipped and as many times as long; *labels*: it trains on labels c - 1 - y.
*Unequal*: no attack, but classes that are shared out unequally (Dirichlet, alpha 0.3).
*Alone*: round.largest_change, clip_change and largest_share are off, so that nothing but the slot combine bounds an
update; *shipped*: as they are by default.

    python -m benchmarks.accuracy.robust --jsonl FILE [--seeds 3] [--write docs/results]    # runs what FILE lacks
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.common import inprocess
from benchmarks.common.result_lines import add_row, rows_in, show
from benchmarks.crash.poisoned import MARGIN, attacked, outcome_of, run_values
from device_agent.trainer import local_trainer
from edgefl.data.dataset import Dataset
from edgefl.training.local_round import Halting, RoundResult, begin_round

PAGE = "robust.md"
#: (devices, attackers).
FLEETS = [(5, 1), (10, 2)]
#: attack -> the factor of its change; None: it trains on wrong labels.
ATTACKS: dict[str, float | None] = {"none": 1.0, "flip": -1.0, "x -10": -10.0, "x -50": -50.0, "labels": None}
UNEQUAL = "unequal"
COLUMNS = [*ATTACKS, UNEQUAL]
#: way -> (slot combine, whether the round's own bounds are on).
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "mean": ({"mean": {}}, False),
    "median": ({"median": {}}, False),
    "trimmed_mean": ({"trimmed_mean": {"share": 0.2}}, False),
    "krum": ({"krum": {"share": 0.2}}, False),
    "norm_clipping": ({"norm_clipping": {}}, False),
    "mean, shipped": ({"mean": {}}, True),
    "median, shipped": ({"median": {}}, True),
}
OPEN = {"clip_change": 0, "largest_change": 0, "largest_share": 1}


class Row(msgspec.Struct, frozen=True):
    """One run. ``accuracy``: with both sensors after each round, percent; honest devices by what was said of them."""

    devices: int
    way: str
    attack: str
    seed: int
    status: str
    accuracy: tuple[float, ...]
    rejected: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, str, str, int]:
        """What tells runs apart."""
        return self.devices, self.way, self.attack, self.seed

    @property
    def last(self) -> float:
        """Final accuracy; 0 of a run that did not end."""
        return self.accuracy[-1] if self.status == "done" and self.accuracy else 0.0


@contextmanager
def mislabelled(attackers: Sequence[str]) -> Iterator[None]:
    """Trainers of this process train the attackers on labels c - 1 - y."""

    def training(job: Any, dataset: Dataset, *rest: Any, salt: str = "", **more: Any) -> Halting[RoundResult]:
        if salt.partition("/")[0] in attackers and dataset.labels is not None:
            last = len(dataset.label_names) - 1
            dataset = dataclasses.replace(dataset, labels=last - dataset.labels)
        return begin_round(job, dataset, *rest, salt=salt, **more)

    with patch.object(local_trainer, "begin_round", training):
        yield


def measured(devices: int, attackers: int, way: str, attack: str, seed: int) -> Row:
    """One run; the first devices attack."""
    combine, shipped = WAYS[way]
    values = run_values(devices, seed)
    values |= {"slots": {"combine": combine}, "round": {} if shipped else OPEN}
    values["model"]["head"]["norm"] = "layer"
    if attack == UNEQUAL:
        values["data"]["partition"] = {"dirichlet": {"alpha": 0.3}}
    evil = [f"d{i}" for i in range(attackers)] if attack in ATTACKS and attack != "none" else []
    factor = ATTACKS.get(attack, 1.0)
    with tempfile.TemporaryDirectory() as folder, mislabelled(evil) if factor is None else attacked(evil, factor):
        _, report = inprocess.run_values(Path(folder), values)
    found = outcome_of(report)
    honest = {f"d{i}" for i in range(devices)} - set(evil)
    told = [tuple(sorted(who & honest)) for who in (found.rejected, found.quarantined, found.clipped)]
    return Row(devices, way, attack, seed, report.status, found.accuracy, *told)


def _cell(rows: Sequence[Row], clean: float) -> str:
    """ "96.1 (95 to 97)", bold where it is more than the margin below ``clean``; what befell honest devices."""
    if not rows:
        return ""
    values = [row.last for row in rows]
    text = f"{statistics.mean(values):.1f}"
    if len(values) > 1:
        text += f" ({min(values):.0f} to {max(values):.0f})"
    text = f"**{text}**" if statistics.mean(values) < clean - MARGIN else text
    blamed = sum(len({*row.rejected, *row.quarantined}) for row in rows)
    return text + f", {blamed} blamed" * bool(blamed)


def page(rows: Sequence[Row]) -> str:
    """Markdown: a table a fleet, a row a way, a column an attack."""
    by: dict[tuple[int, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda one: one.key):
        by.setdefault((row.devices, row.way, row.attack), []).append(row)
    about, _ = (__doc__ or "").split("\n\n    python", 1)
    text = ["# Robust combination", "", *_verdict(by), "", *about.split("\n\n")[1].splitlines(), ""]
    text += [
        "Final accuracy in percent, mean of the seeds (lowest to highest; without these, one seed). Bold: more than",
        f"{MARGIN:g} points below the same row without an attack. *Blamed*: honest devices rejected or in quarantine.",
    ]
    for devices, attackers in FLEETS:
        text += ["", f"## {attackers} of {devices} devices", "", f"| combine | {' | '.join(COLUMNS)} |"]
        text += ["|---" * (len(COLUMNS) + 1) + "|"]
        for way in WAYS:
            clean = statistics.mean([row.last for row in by.get((devices, way, "none"), [])] or [0.0])
            cells = [_cell(by.get((devices, way, attack), []), clean) for attack in COLUMNS]
            text.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(
        [*text, "", "`python -m benchmarks.accuracy.robust --jsonl FILE --seeds 3 --write docs/results`", ""]
    )


def _verdict(by: Mapping[tuple[int, str, str], Sequence[Row]]) -> list[str]:
    """The one sentence that matters: by how much the mean and the median fall at most."""

    def fall(way: str) -> float:
        means = {
            key: statistics.mean(row.last for row in rows)
            for key, rows in by.items()
            if key[1] == way and key[2] in ATTACKS
        }
        return max((means[n, way, "none"] - value for (n, _, _), value in means.items()), default=0.0)

    alone = f"Without any other bound the mean loses up to {fall('mean'):.0f} points to an attack, the median"
    return [
        f"{alone} up to {fall('median'):.0f}; with",
        f"the bounds that ship, {fall('mean, shipped'):.0f} and {fall('median, shipped'):.0f}.",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", type=Path, help=f"folder of {PAGE}")
    options = parser.parse_args()
    rows = rows_in(options.jsonl, Row)
    done = {row.key for row in rows}
    for seed in range(1, options.seeds + 1):
        for (devices, attackers), way, attack in itertools.product(FLEETS, WAYS, COLUMNS):
            if (devices, way, attack, seed) not in done:
                rows.append(measured(devices, attackers, way, attack, seed))
                add_row(options.jsonl, rows[-1])
    show(page(rows), options.write and options.write / PAGE)


if __name__ == "__main__":
    main()

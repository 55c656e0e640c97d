"""What privacy of each device costs in accuracy, by the number of devices and the budget.

Six activities by a phone's accelerometer and gyroscope (har_hapt, EDGEFL_DATA). The windows of 18 people are dealt out
to the devices, person by person, so that few windows of one person are a device's where there are many; three people
are nobody's: of their windows are the constants that features are scaled by. Tested on the nine people of the authors'
test split. 20 rounds, which together cost the budget, at delta 1e-5; every device takes part in each.

*Linear*: softmax regression on six statistics of each axis (222 weights), five steps a round. Devices are simulated,
their steps by numpy; the server's round is the product's. Rate and clip (2) are those that did best of a few on another
draw of the devices, with the same test. *Split*: the same, the noise added by the devices (at: devices), of which a
tenth, drawn anew in each round, is lost. *Transformer*: real device agents in one process train two small encoders on
the windows themselves (recipe dp-fedavg), an epoch a round.

    python -m benchmarks.accuracy.privacy --jsonl FILE [--seeds 3] [--write docs/results]    # runs what FILE lacks
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.common import inprocess
from benchmarks.common.result_lines import add_row, rows_in, show
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.data.dataset import Dataset
from edgefl.plan.privacy import resolved
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.registry import Trained, choose
from edgefl.storage.objects import ObjectStore

PAGE = "privacy.md"
#: Budgets of epsilon; 0: without privacy.
BUDGETS = (0.0, 8.0, 4.0, 2.0)
FLEETS = {"linear": (10, 30, 100, 300, 1000), "split": (30, 100), "transformer": (30,)}
DELTA, ROUNDS, STEPS, CLIP, RATE = 1e-5, 20, 5, 2.0, 5.0
CLASSES, PUBLIC = 6, 3
Floats = np.ndarray


class Row(msgspec.Struct, frozen=True):
    """One run. ``accuracy``: at the end, percent; ``epsilon``, ``server``: as accounted, 0 without privacy."""

    model: str
    devices: int
    budget: float
    seed: int
    accuracy: float
    epsilon: float = 0.0
    server: float = 0.0  # where the noise is split

    @property
    def key(self) -> tuple[str, int, float, int]:
        """What tells runs apart."""
        return self.model, self.devices, self.budget, self.seed


class Windows(NamedTuple):
    """Windows [N, T, 3] of both sensors, their labels and people."""

    acc: Floats
    gyro: Floats
    labels: Floats
    people: Floats

    def of(self, chosen: Floats) -> Windows:
        """The windows at these places."""
        return Windows(self.acc[chosen], self.gyro[chosen], self.labels[chosen], self.people[chosen])


def recorded() -> tuple[Windows, Windows, Windows]:
    """Windows of the fleet, of nobody, and of the test."""
    with np.load(Path(os.environ["EDGEFL_DATA"]) / "har_hapt" / "har_hapt.npz") as file:
        held = {name: file[name] for name in ("acc", "gyro", "label", "subject", "split")}
    acc, gyro = (held[name].astype(np.float32) for name in ("acc", "gyro"))
    every = Windows(acc, gyro, held["label"].astype(np.int64), held["subject"].astype(np.int64))
    basic, train = every.labels < CLASSES, held["split"] == 0
    public = np.isin(every.people, np.unique(every.people[train])[:PUBLIC])
    return every.of(basic & train & ~public), every.of(basic & public), every.of(basic & ~train)


def dealt(people: Floats, devices: int, rng: np.random.Generator) -> list[Floats]:
    """Places of each device's windows: pieces of nearly equal size, in order of people, shuffled within each."""
    order = np.lexsort((rng.random(people.size), people))
    return np.array_split(order, devices)


def features(windows: Windows) -> Floats:
    """Mean, deviation and the logarithms of four bands' energies of each axis [N, 36]."""
    signals = np.concatenate([windows.acc, windows.gyro], axis=2)
    power = np.abs(np.fft.rfft(signals - signals.mean(1, keepdims=True), axis=1)[:, 1:]) ** 2
    bands = [np.log(power[:, a:b].sum(1) + 1e-3) for a, b in itertools.pairwise((0, 2, 5, 12, 64))]
    return np.concatenate([signals.mean(1), signals.std(1), *bands], axis=1)


def trained(weights: Floats, x: Floats, labels: Floats) -> Floats:
    """The weights [37, 6] after the device's steps on the cross-entropy of all its windows."""
    weights, aims = weights.astype(np.float64), np.eye(CLASSES)[labels]
    for _ in range(STEPS):
        logits = x @ weights
        shares = np.exp(logits - logits.max(1, keepdims=True))
        weights = weights - RATE * x.T @ (shares / shares.sum(1, keepdims=True) - aims) / len(x)
    return weights.astype(np.float32)


def linear(devices: int, budget: float, seed: int, *, split: bool = False) -> Row:
    """Simulated devices, and the product's rounds. ``split``: the devices add the noise, and a tenth is lost."""
    fleet, nobody, test = recorded()
    known = features(nobody)

    def scaled(windows: Windows) -> Floats:
        x = (features(windows) - known.mean(0)) / known.std(0) / np.sqrt(known.shape[1])  # rows about as long as 1
        return np.concatenate([x, np.ones((len(x), 1))], axis=1)

    x, rng = scaled(fleet), np.random.default_rng(seed)
    shares = dealt(fleet.people, devices, rng)
    combine: dict[str, Any] = {"mean": {}}
    if budget:
        at = "devices" if split else "server"
        combine = {"gaussian_noise": {"clip": CLIP, "epsilon": budget, "delta": DELTA, "at": at}}
    terms = RoundTerms(stage=1, trained=("task",), devices=devices, rounds=ROUNDS)
    made = resolved({"combine": combine, "upload": {"whole": {}}}, devices, ROUNDS)
    upload = choose("upload", made)
    send = upload.bind(upload.method.send) if split and budget else None
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108
        store, account = ObjectStore(Path(folder)), dict[str, float]()
        weights = np.zeros((x.shape[1], CLASSES), np.float32)
        state = {"task": store.put(encode_part({"w": weights}))}
        for _ in range(ROUNDS):
            updates = []
            lost = set(rng.choice(devices, devices // 10, replace=False)) if split else set()
            for i, share in enumerate(shares):
                if i in lost:
                    continue
                own = {"task": {"w": trained(weights, x[share], fleet.labels[share])}}
                if send is not None:
                    own, _ = send(Trained(own, {"task": {"w": weights}}, {}, {}), rng)
                part = store.put(encode_part(own["task"]))
                updates.append(UpdateInfo(f"d{i:05}", {"task": part}, {"task": len(share)}))
            state, record = aggregate_round(updates, store, state, {"combine": combine}, terms)
            weights, account = decode_part(store.read(state["task"].id))["w"], record.get("account", {})
    right = (scaled(test) @ weights).argmax(1) == test.labels
    told = account.get("epsilon", 0.0), account.get("server", 0.0)
    return Row("split" if split else "linear", devices, budget, seed, 100 * float(right.mean()), *told)


def transformer(devices: int, budget: float, seed: int) -> Row:
    """Real agents in one process."""
    fleet, _, test = recorded()
    names = tuple(f"activity {i}" for i in range(CLASSES))

    def data(windows: Windows) -> Dataset:
        values, ids = {"acc": windows.acc, "gyro": windows.gyro}, [str(i) for i in range(len(windows.labels))]
        present = {m: np.ones(len(ids), bool) for m in values}
        return Dataset(values, present, windows.labels, names, ids)

    shares = dealt(fleet.people, devices, np.random.default_rng(seed))
    encoder = {"kind": "sensor", "width": 32, "depth": 1, "heads": 2, "patch": 16}
    values: dict[str, Any] = {
        "name": "privacy",
        "seed": seed,
        "recipe": "dp-fedavg",
        "model": {
            "stages": 1,
            "encoders": {"acc": encoder, "gyro": encoder},
            "head": {"kind": "none", "out": 32},
            "fusion_width": 32,
        },
        "training": {"rounds": [ROUNDS], "epochs": 1, "batch_size": 16, "lr": {"encoder": 3e-3, "head": 3e-3}},
        "evaluate": "stage",
        "round": {"devices": devices},
        "slots": {"combine": {"mean": {}}},
    }
    if budget:
        options = {"clip": CLIP, "epsilon": budget, "delta": DELTA}
        values["slots"] = {"combine": {"gaussian_noise": options}}
    with tempfile.TemporaryDirectory() as folder:
        given = {f"d{i:05}": data(fleet.of(share)) for i, share in enumerate(shares)}
        report = inprocess.run_shares(Path(folder), values, given, data(test))
    last = [row.value for row in report.evaluations if row.metric == "accuracy" and row.missing == "none"]
    record = report.rounds[-1].record
    return Row("transformer", devices, budget, seed, 100 * last[-1], record.get("account", {}).get("epsilon", 0.0))


RUNS: dict[str, Callable[[int, float, int], Row]] = {
    "linear": linear,
    "split": partial(linear, split=True),
    "transformer": transformer,
}


def page(rows: Sequence[Row]) -> str:
    """Markdown: a table a model, a row a number of devices, a column a budget."""
    by: dict[tuple[str, int, float], list[float]] = {}
    for row in sorted(rows, key=lambda one: one.key):
        by.setdefault((row.model, row.devices, row.budget), []).append(row.accuracy)
    about, _ = (__doc__ or "").split("\n\n    python", 1)
    text = ["# Privacy of each device", "", _verdict(by), "", *"\n\n".join(about.split("\n\n")[1:]).splitlines()]
    text += ["", "Accuracy in percent, mean of the seeds (lowest to highest; without these, one seed)."]
    for model in FLEETS:
        fleets = sorted({devices for one, devices, _ in by if one == model})
        if not fleets:
            continue
        names = " | ".join(f"epsilon {budget:g}" if budget else "without" for budget in BUDGETS)
        text += ["", f"## {model.capitalize()}", "", f"| devices | {names} |", "|---" * (len(BUDGETS) + 1) + "|"]
        for devices in fleets:
            cells = [_cell(by.get((model, devices, budget), [])) for budget in BUDGETS]
            text.append(f"| {devices:,} | {' | '.join(cells)} |")
            towards = {row.budget: f"{row.server:.0f}" for row in rows if (row.model, row.devices) == (model, devices)}
            if model == "split":
                cells = [towards.get(budget, "") if budget else "" for budget in BUDGETS]
                text.append(f"| {devices:,}: epsilon towards the server | {' | '.join(cells)} |")
    return "\n".join([*text, "", "`python -m benchmarks.accuracy.privacy --jsonl FILE --write docs/results`", ""])


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _verdict(by: Mapping[tuple[str, int, float], Sequence[float]]) -> str:
    """The one sentence that matters: what epsilon 8 takes from the smallest and the largest fleet."""
    fleets = sorted({devices for model, devices, budget in by if model == "linear" and budget == 8.0})
    if not fleets:
        return ""
    lost = [
        statistics.mean(by["linear", n, 0.0]) - statistics.mean(by["linear", n, 8.0]) for n in (fleets[0], fleets[-1])
    ]
    return (
        f"Epsilon 8 takes {lost[0]:.0f} points from a linear model of {fleets[0]} devices, and {lost[1]:.1f} of "
        f"{fleets[-1]:,}: noise is shared by those who take part."
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", type=int, default=3, help="of the linear models; the other has one")
    parser.add_argument("--models", nargs="+", choices=FLEETS, default=list(FLEETS))
    parser.add_argument("--write", type=Path, help=f"folder of {PAGE}")
    options = parser.parse_args()
    rows = rows_in(options.jsonl, Row)
    done = {row.key for row in rows}
    for model in options.models:
        seeds = range(1, (1 if model == "transformer" else options.seeds) + 1)
        for seed, devices, budget in itertools.product(seeds, FLEETS[model], BUDGETS):
            if (model, devices, budget, seed) not in done:
                rows.append(RUNS[model](devices, budget, seed))
                add_row(options.jsonl, rows[-1])
    show(page(rows), options.write and options.write / PAGE)


if __name__ == "__main__":
    main()

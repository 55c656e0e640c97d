"""Pretrained encoders of the named data sets, and what a linear probe sees in them.

Trains encoders of encoders.yaml on the share of its data set that no device and no test holds, into
build/pretrained/<name>.safetensors (the share itself: <name>.npz), and measures each: accuracy on the test part of a
logistic regression on the frozen features, fitted to the training part, and of one on simple features of the same
samples (baselines.py). The figures go to <name>.json beside it, all that there are into docs/results/encoders.md. One
thread; on one machine the tensors are the same each time.

    python -m benchmarks.accuracy.encoders [av-image emoji-image ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import yaml

from benchmarks.accuracy.baselines import distinct, probe, simple
from benchmarks.accuracy.pretrain import How, encoder, labels_of, model_of, pretrain
from edgefl.data.dataset import Dataset
from edgefl.data.named import Named, named
from edgefl.errors import DataError
from edgefl.models.checkpoints import initial_parts
from edgefl.models.own_checkpoint import save_encoders
from edgefl.models.parts import load_part
from edgefl.models.staged import StagedModel

ENCODERS = Path(__file__).with_name("encoders.yaml")
FOLDER = Path("build/pretrained")
PAGE = Path("docs/results/encoders.md")
#: Samples at once when features are computed: bounds memory, changes nothing.
BATCH = 256


class Entry(msgspec.Struct, frozen=True):
    """One file of encoders. ``how`` empty: from a package, as it is."""

    source: dict[str, dict[str, Any]]
    encoders: dict[str, dict[str, Any]]
    how: dict[str, Any] = {}
    multiway: bool = False


class Row(msgspec.Struct, frozen=True):
    """One encoder. ``samples`` and ``seconds``: of its pretraining; of a multiway file, of the whole file."""

    name: str
    modality: str
    samples: int
    epochs: int
    seconds: float
    probe: float
    simple: float


def entries(path: Path = ENCODERS) -> dict[str, Entry]:
    """The entries of encoders.yaml by name."""
    return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8"))["encoders"], dict[str, Entry])


@cache
def _data(source: bytes) -> Named:
    ((name, options),) = msgspec.json.decode(source).items()
    return named(name, options)


def data_of(entry: Entry) -> Named:
    """Training part, test part and reserved share; kept for the next entry of the same source."""
    return _data(msgspec.json.encode(entry.source))


def make(entry: Entry, path: Path, seed: int = 0) -> float:
    """Pretrain the encoders of ``entry`` into ``path``; CPU seconds. Raises DataError where no share is reserved."""
    reserved = data_of(entry).reserved
    if reserved is None:
        raise DataError(f"{path.stem}: no share is reserved", remedy="Set the option reserve of its source.")
    started = time.process_time()
    shapes = reserved.signature()
    specs = {m: encoder(fields, shapes[m]) for m, fields in entry.encoders.items()}
    model = model_of(specs, multiway=entry.multiway, seed=seed)
    pretrain(model, reserved, How(**entry.how), seed)
    save_encoders(path, model)
    reserved.save_npz(path.with_suffix(".npz"))
    return time.process_time() - started


def start_of(entry: Entry, path: Path) -> StagedModel:
    """The encoders as a run starts with them, whose run file names ``path``, or the package's own checkpoint."""
    shapes = data_of(entry).train.signature()
    own = {"pretrained": str(path)} if entry.how else {}
    specs = {m: encoder({**fields, **own}, shapes[m]) for m, fields in entry.encoders.items()}
    model = model_of(specs, multiway=entry.multiway, seed=0)
    for part, tensors in initial_parts(model.spec):
        if part in model.parts_present:
            load_part(model, part, tensors)
    return model.eval()


@torch.no_grad()
def features(model: StagedModel, modality: str, data: Dataset) -> np.ndarray[Any, Any]:
    """Frozen features [N, D] of one modality, by itself."""
    values = data.modalities[modality]
    chunks = [torch.from_numpy(values[i : i + BATCH]) for i in range(0, len(values), BATCH)]
    return torch.cat([model.encode(modality, x) for x in chunks]).numpy()


def measure(name: str, entry: Entry, seconds: float) -> Iterator[Row]:
    """The rows of one file: each of its encoders beside the simple features of the same samples."""
    data, model = data_of(entry), start_of(entry, FOLDER / f"{name}.safetensors")
    samples = len(data.reserved) if data.reserved is not None and entry.how else 0
    for m in entry.encoders:
        train, test = data.train.subset(distinct(data.train.modalities[m])), data.test
        found = probe((features(model, m, train), labels_of(train)), (features(model, m, test), labels_of(test)))
        bar = _simple(msgspec.json.encode(entry.source), m)
        yield Row(name, m, samples, entry.how.get("epochs", 0), seconds, found, bar)


@cache
def _simple(source: bytes, modality: str) -> float:
    data = _data(source)
    train = data.train.subset(distinct(data.train.modalities[modality]))
    of_train, of_test = (simple(part.modalities[modality], modality) for part in (train, data.test))
    return probe((of_train, labels_of(train)), (of_test, labels_of(data.test)))


def table(rows: list[Row]) -> str:
    """The rows as a table of Markdown."""
    lines = [
        "| file | modality | frozen features | simple features | difference | pretrained on | epochs | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = [f"{row.samples:,}", str(row.epochs), f"{row.seconds:.0f}"] if row.epochs else ["a package's", "", ""]
        cells = [row.name, row.modality, f"{row.probe:.1%}", f"{row.simple:.1%}"]
        lines.append("| " + " | ".join([*cells, f"{100 * (row.probe - row.simple):+.1f}", *told]) + " |")
    return "\n".join(lines)


def write_page(names: Iterable[str], path: Path = PAGE) -> None:
    """Put the rows that are in ``FOLDER`` between the page's two marks."""
    files = [file for file in (FOLDER / f"{name}.json" for name in names) if file.is_file()]
    rows = [row for file in files for row in msgspec.json.decode(file.read_bytes(), type=list[Row])]
    start, end = "<!-- table -->\n", "\n<!-- end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(start)
    path.write_text(before + start + table(rows) + end + rest.partition(end)[2], encoding="utf-8")


def main() -> None:
    """Pretrain, measure, print, and write the page of all that there are."""
    known: Mapping[str, Entry] = entries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*known, []], help="files to make; none: all")
    names = parser.parse_args().names
    torch.set_num_threads(1)  # of encoders this small, more threads only wait for each other
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        entry = known[name]
        seconds = make(entry, FOLDER / f"{name}.safetensors") if entry.how else 0.0
        rows = list(measure(name, entry, seconds))
        (FOLDER / f"{name}.json").write_bytes(msgspec.json.encode(rows))
        print(table(rows), flush=True)
    write_page(known)


if __name__ == "__main__":
    main()

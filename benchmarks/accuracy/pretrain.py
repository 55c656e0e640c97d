"""Pretrains one modality's encoder, centrally, on a share of a data set's training part; writes an own checkpoint.

Supervised classification of this modality's samples alone, with a linear classifier that is thrown away. Only
``--share`` (default 0.3) of the training part is used: of data with groups the first 30 % of the groups in the order
of their names, such as people; otherwise the first 30 % of the samples. These groups are devices of a federated run
too, so the start is not from foreign data. Test samples are never trained on. `har_hapt` by name takes windows that
are training windows under both the authors' split and the split by time (clients: 30); with options, such as
'{har_hapt: {clients: 30}}', exactly the training part that a run file's data.source with the same options has.

With --multiway the blocks are those of multiway encoders; several modalities then share the attention, and each batch
is of one of them alone, in turns: no sample is ever seen with both.

    python -m benchmarks.accuracy.pretrain har_hapt acc --encoder \\
        '{kind: sensor, width: 32, depth: 4, heads: 2, patch: 16}'
    python -m benchmarks.accuracy.pretrain av_digits image audio --multiway --size tiny \\
        --out build/pretrained/av.safetensors
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
import yaml
from torch import Tensor, nn

from benchmarks.accuracy.augment import AUGMENT
from benchmarks.accuracy.baselines import simple
from edgefl.config.encoder import EncoderConfig
from edgefl.data.dataset import Dataset
from edgefl.data.named import named
from edgefl.errors import ModelError
from edgefl.models.check import encoder_of_size
from edgefl.models.own_checkpoint import save_encoders
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, is_encoder, part_names
from edgefl.models.staged import StagedModel, build

FOLDER = Path("build/pretrained")
KINDS = {"acc": "sensor", "gyro": "sensor", "image": "vision", "audio": "audio", "text": "text"}


class How(NamedTuple):
    """How encoders are trained: AdamW with a rate that falls to zero along a cosine, in ``epochs`` passes.

    ``smoothing`` of labels; ``augment``: each batch changed at random (augment.py); ``simple``: weight of a second task
    beside the class, to tell the simple features (baselines.py) of the sample as it is shown.
    """

    epochs: int = 20
    batch: int = 32
    lr: float = 1e-3
    decay: float = 0.01
    smoothing: float = 0.0
    augment: bool = False
    simple: float = 0.0


#: Samples at once when testing: bounds memory, changes nothing.
TEST_BATCH = 256


def training_data(source: str | Mapping[str, Any], share: float) -> tuple[Dataset, Dataset]:
    """(the share of the training part that is trained on, the whole test part)."""
    name, options = (source, None) if isinstance(source, str) else next(iter(source.items()))
    if name == "har_hapt" and not options:
        train, test, _, _ = named(name, {"clients": 30})
        official, _, _, _ = named(name, {})
        train = train.subset(np.isin(np.asarray(train.ids), official.ids))
    else:
        train, test, _, _ = named(name, options)
    return first_share(train, share), test


def first_share(data: Dataset, share: float) -> Dataset:
    """Samples of the first ``share`` of the groups by name, of one group at least; without groups the first samples."""
    if data.groups is None:
        return data.subset(np.arange(max(1, round(share * len(data)))))
    names = np.unique(data.groups)
    return data.subset(np.isin(data.groups, names[: max(1, round(share * len(names)))]))


def make(
    source: str | Mapping[str, Any],
    encoders: Mapping[str, Mapping[str, Any]],
    path: Path,
    *,
    multiway: bool = False,
    share: float = 0.3,
    epochs: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Pretrain the encoders of these modalities and write them to ``path``; each one's accuracy on the test part.

    ``encoders``: modality -> fields of an entry of model.encoders in a run file.
    """
    torch.set_num_threads(1)  # of encoders this small, more threads only wait for each other
    train, test = training_data(source, share)
    shapes = train.signature()
    specs = {m: encoder(fields, shapes[m]) for m, fields in encoders.items()}
    model = model_of(specs, multiway=multiway, seed=seed)
    heads = pretrain(model, train, How(epochs=epochs), seed)
    save_encoders(path, model)
    return {m: accuracy(model, heads, m, test) for m in specs}


def encoder(fields: Mapping[str, Any], shape: tuple[int, ...]) -> EncoderSpec:
    """The encoder of an entry of model.encoders in a run file, for samples of ``shape``."""
    config = EncoderConfig.model_validate(dict(fields))
    changes = config.model_dump(exclude={"kind", "size", "columns"}, exclude_none=True)
    return encoder_of_size(config.kind, config.size, shape, **changes)


def model_of(encoders: Mapping[str, EncoderSpec], *, multiway: bool, seed: int) -> StagedModel:
    """The encoders alone. One stage each: the file does not depend on the number of stages."""
    if len(encoders) > 1 and not multiway:
        raise ModelError("separate encoders are pretrained one by one", remedy="Name one modality, or add --multiway.")
    sharing: Any = "multiway" if multiway else "separate"
    spec = ModelSpec(dict(encoders), stages=1, head=HeadSpec(), encoder_sharing=sharing)
    return build(spec, [part for part in part_names(spec) if is_encoder(part)], seed=seed)


def pretrain(model: StagedModel, train: Dataset, how: How = How(), seed: int = 0) -> nn.ModuleDict:  # noqa: B008 - a constant
    """Train the encoders in place; returns the classifiers."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    encoders = model.spec.encoders
    heads = nn.ModuleDict({m: nn.Linear(e.width, len(train.label_names)) for m, e in encoders.items()})
    tellers = nn.ModuleDict({m: Teller(train, m, e.width) for m, e in encoders.items() if how.simple})
    learned = [p for module in (model, heads, tellers) for p in module.parameters()]
    optimizer = torch.optim.AdamW(learned, lr=how.lr, weight_decay=how.decay)
    steps = sum(len(_usable(train, m)) // how.batch for m in encoders) * how.epochs
    if steps == 0:
        raise ModelError(f"{len(train)} samples do not fill a batch of {how.batch}", remedy="Raise --share.")
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(how.epochs):
        for m, rows in _in_turns({m: _batches(_usable(train, m), how.batch, rng) for m in encoders}):
            x, y = _tensors(train, m, rows)
            x = AUGMENT[encoders[m].kind](x) if how.augment else x
            h = model.encode(m, x)
            loss = F.cross_entropy(heads[m](h), y, label_smoothing=how.smoothing)
            loss = loss + how.simple * tellers[m](h, x) if how.simple else loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
    return heads


class Teller(nn.Module):
    """Tells a modality's simple features of its representation h [B, D], linearly: the mean squared error."""

    mean: Tensor  # of each feature in the training samples
    std: Tensor

    def __init__(self, train: Dataset, modality: str, width: int) -> None:
        super().__init__()
        self.modality = modality
        features = simple(train.modalities[modality], modality)
        self.register_buffer("mean", torch.from_numpy(features.mean(axis=0)))
        self.register_buffer("std", torch.from_numpy(features.std(axis=0) + 1e-3))  # some colours are never there
        self.project = nn.Linear(width, features.shape[1])

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        wanted = (torch.from_numpy(simple(x.numpy(), self.modality)) - self.mean) / self.std
        return F.mse_loss(self.project(h), wanted.float())


@torch.no_grad()
def accuracy(model: StagedModel, heads: nn.ModuleDict, modality: str, test: Dataset) -> float:
    """Share of the test samples with this modality that are classified right."""
    model.eval()
    rows, right = _usable(test, modality), 0
    for start in range(0, len(rows), TEST_BATCH):
        x, y = _tensors(test, modality, rows[start : start + TEST_BATCH])
        right += int((heads[modality](model.encode(modality, x)).argmax(1) == y).sum())
    return right / len(rows)


def _usable(data: Dataset, modality: str) -> np.ndarray[Any, Any]:
    """Labelled samples that have the modality."""
    return np.flatnonzero(data.has(modality) & (labels_of(data) >= 0))


def labels_of(data: Dataset) -> np.ndarray[Any, Any]:
    """Labels [N], -1 where there is none."""
    return np.full(len(data), -1) if data.labels is None else data.labels


def _batches(rows: np.ndarray[Any, Any], size: int, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """All rows in a random order; what does not fill a batch is left out."""
    order = rng.permutation(rows)
    return [order[i : i + size] for i in range(0, len(order) - size + 1, size)]


def _in_turns(batches: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    for i in range(max(map(len, batches.values()))):
        yield from ((m, own[i]) for m, own in batches.items() if i < len(own))


def _tensors(data: Dataset, modality: str, rows: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(data.modalities[modality][rows]), torch.from_numpy(labels_of(data)[rows])


def main() -> None:
    """Pretrain, print the test accuracy, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a named data set, or {name: options} as in a run file's data.source")
    parser.add_argument("modalities", nargs="+", help="which to pretrain; several only with --multiway")
    parser.add_argument("--size", default="tiny", help="size of the encoder, where --encoder is not given")
    parser.add_argument(
        "--encoder", action="append", default=[], help="as under model.encoders; once for all, or one a modality"
    )
    parser.add_argument("--multiway", action="store_true", help="blocks with attention to share")
    parser.add_argument("--out", type=Path, help=f"file to write; default: {FOLDER}/DATA-MODALITY.safetensors")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the share")
    parser.add_argument("--share", type=float, default=0.3, help="share of the training part that is used")
    parser.add_argument("--seed", type=int, default=0, help="of first weights and order")
    options = parser.parse_args()
    if len(options.encoder) not in {0, 1, len(options.modalities)}:
        parser.error("give --encoder once, or once for each modality")
    source = yaml.safe_load(options.data)
    fields = [yaml.safe_load(text) for text in options.encoder] or [{}]
    fields = fields * len(options.modalities) if len(fields) == 1 else fields
    defaults = [{"kind": KINDS.get(m, "sensor"), "size": options.size} for m in options.modalities]
    encoders = {m: own or default for m, own, default in zip(options.modalities, fields, defaults, strict=True)}
    name = source if isinstance(source, str) else next(iter(source))
    out = options.out or FOLDER / f"{'-'.join([name, *encoders])}.safetensors"
    given = {"multiway": options.multiway, "share": options.share, "epochs": options.epochs, "seed": options.seed}
    started = time.monotonic()
    for m, found in make(source, encoders, out, **given).items():
        print(f"{m}: test accuracy {found:.1%}")
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

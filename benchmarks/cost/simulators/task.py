"""Task of the simulators: users, samples, models, first weights, test set, marks.

Imports neither EdgeFL nor another simulator: it is used in the environment of each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

#: Users, samples of each, users asked a round, samples of a step, SGD's rate.
USERS, SAMPLES, COHORT, BATCH, RATE = 1000, 50, 20, 10, 0.1
CLASSES, TEST = 10, 2000
#: A picture; a window of 32 time steps of six sensors.
PICTURE, WINDOW = (32, 32, 3), (32, 6)
#: Deviation of the classes' means, of blocks of 4 x 4 pixels or 4 time steps, beside noise of 1 a value.
CONTRAST, BLOCK = 0.7, 4
#: Share of the labels that are drawn at random: a model that has learnt the classes is right in 82 %.
UNKNOWABLE = 0.2


class Rounds(NamedTuple):
    """``warm``: rounds before the clock; ``timed``: rounds on it."""

    warm: int
    timed: int

    @property
    def all(self) -> int:
        return self.warm + self.timed


class ChannelsFirst(nn.Module):
    """[B, height, width, channels] -> [B, channels, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


def lenet() -> nn.Module:
    """LeNet-5 on colours: [B, 32, 32, 3] -> [B, 84]."""
    first = [ChannelsFirst(), nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())


def cnn() -> nn.Module:
    """The network of pfl's benchmarks on CIFAR-10, without its dropout: [B, 32, 32, 3] -> [B, 128]."""
    convolutions = [ChannelsFirst(), nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12544, 128), nn.ReLU())


class Patches(nn.Module):
    """Tokens with places: windows [B, 32, 6] -> [B, 8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.places = nn.Linear(BLOCK * WINDOW[1], 32), nn.Parameter(torch.zeros(WINDOW[0] // BLOCK, 32))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.project(x.reshape(x.shape[0], WINDOW[0] // BLOCK, -1)) + self.places
        return tokens


class MeanToken(nn.Module):
    """Mean over tokens: [B, tokens, width] -> [B, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def sensor() -> nn.Module:
    """Transformer for windows of sensors: [B, 32, 6] -> [B, 32]."""
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(32, 4, 128, **options) for _ in range(3)]  # type: ignore[arg-type]
    return nn.Sequential(Patches(), *blocks, MeanToken())


class Model(NamedTuple):
    """Network before the last norm and linear map; its width; a sample's modality and shape."""

    make: Callable[[], nn.Module]
    width: int
    modality: str
    shape: tuple[int, ...]


MODELS = {
    "sensor": Model(sensor, 32, "sensor", WINDOW),
    "lenet": Model(lenet, 84, "image", PICTURE),
    "cnn": Model(cnn, 128, "image", PICTURE),
}


class Net(nn.Module):
    """Samples [B, …] -> logits [B, classes]: network, layer norm, linear map."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, width, _, _ = MODELS[name]
        self.encoder, self.norm, self.last = make(), nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.norm(self.encoder(x)))
        return logits


class Samples(NamedTuple):
    """Values [N, …] and labels [N]. Those of user u are ``of_user(u)``."""

    values: Tensor
    labels: Tensor

    def of_user(self, user: int) -> Samples:
        rows = slice(user * SAMPLES, (user + 1) * SAMPLES)
        return Samples(self.values[rows], self.labels[rows])


def write_samples(folder: Path, modality: str, shape: tuple[int, ...]) -> None:
    """``train.npz`` and ``test.npz`` as EdgeFL reads them, and their arrays as files that can be mapped."""
    draw = np.random.default_rng(0)
    means = draw.normal(scale=CONTRAST, size=(CLASSES, *(side // BLOCK for side in shape[:-1]), shape[-1]))
    for axis in range(1, len(shape)):
        means = means.repeat(BLOCK, axis)
    for name, rows in (("train", USERS * SAMPLES), ("test", TEST)):
        labels = draw.integers(0, CLASSES, rows)
        values = draw.standard_normal((rows, *shape), np.float32)
        values += means.astype(np.float32)[labels]
        labels = np.where(draw.random(rows) < UNKNOWABLE, draw.integers(0, CLASSES, rows), labels)
        names = np.array([f"class-{n}" for n in range(CLASSES)])
        arrays = {modality: values, "label": labels, "label_names": names}
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        np.save(folder / f"{name}-values.npy", values)
        np.save(folder / f"{name}-labels.npy", labels)


def samples(folder: Path, name: str, *, mapped: bool = False) -> Samples:
    """ "train" or "test" as ``write_samples`` left them; ``mapped``: pages of the file that processes share."""
    values = np.load(folder / f"{name}-values.npy", mmap_mode="c" if mapped else None)
    return Samples(torch.from_numpy(values), torch.from_numpy(np.load(folder / f"{name}-labels.npy")))


def first_net(folder: Path, name: str) -> Net:
    """The model with its first weights, of ``<name>.npz``."""
    net = Net(name)
    with np.load(folder / f"{name}.npz") as file:
        net.load_state_dict({key: torch.from_numpy(file[key]) for key in file.files})
    return net


def train_user(net: Net, own: Samples, draw: np.random.Generator) -> None:
    """An epoch of SGD on a user's samples."""
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    order = torch.from_numpy(draw.permutation(len(own.labels)))
    for rows in torch.split(order, BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(own.values[rows]), own.labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def accuracy(net: Net, folder: Path) -> float:
    """Share of the test set that is classified rightly, 0..1."""
    test = samples(folder, "test")
    net.eval()
    batches = zip(torch.split(test.values, 250), torch.split(test.labels, 250), strict=True)
    right = sum(int((net(values).argmax(dim=1) == labels).sum()) for values, labels in batches)
    return right / len(test.labels)


class Mark(NamedTuple):
    """The end of a round: seconds of the system's clock, and of the processor, of the process and all it started."""

    round: int
    at_s: float
    cpu_s: float


class Journal:
    """The ends of the first round, of the last before the clock, and of the last one; then the accuracy."""

    def __init__(self, folder: Path, rounds: Rounds) -> None:
        self._marks: list[Mark] = []
        self._file, self._rounds = folder / "journal.json", rounds

    def ended(self, number: int) -> None:
        """Round ``number``, counted from 1, has ended."""
        if number in {1, self._rounds.warm, self._rounds.all}:
            self._marks.append(Mark(number, time.monotonic(), processors_s()))

    def write(self, accuracy: float) -> None:
        """All of it. Raises AssertionError where rounds are missing."""
        assert {mark.round for mark in self._marks} == {1, self._rounds.warm, self._rounds.all}, self._marks
        self._file.write_text(json.dumps({"marks": self._marks, "accuracy": accuracy}))


def processors_s() -> float:
    """Processor seconds of this process and of all it started, those that ended and were waited for included."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


class Asked(NamedTuple):
    """What a simulator's program is called with: folder of the task, model, rounds."""

    folder: Path
    model: str
    rounds: Rounds

    @property
    def journal(self) -> Journal:
        return Journal(self.folder, self.rounds)


def asked() -> Asked:
    """The program's arguments; torch has one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, model, warm, timed = sys.argv[1:]
    return Asked(Path(folder), model, Rounds(int(warm), int(timed)))

"""Training steps of a round's devices one by one and jointly, by stacked weights, in turns: processor time of a step.

20 devices with batches of 10, 32 and 64, end-to-end. The sensor encoder has three blocks, 32 wide, on windows of 32 x
6, and a head with layer norm, or EdgeFL's default one (dropout and batch norm); LeNet-5 and the CNN are those of the
simulators above. The bare loop is torch alone: forward pass, backward pass and torch.optim of the same module, device
after device. A joint step is one by `edgefl.training.joint_steps`; that its gradients are those of one by one to
rounding is checked first. One thread; a step's time is per device, the gain the median of the turns with their range.

    python -m benchmarks.cost.joint [--times 3] [--write docs/results]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

import edgefl
from benchmarks.common.sections import put
from benchmarks.cost.simulators.__main__ import HEAD
from benchmarks.cost.simulators.task import CLASSES, MODELS
from edgefl.data.dataset import Dataset
from edgefl.encoder_kinds import name_of
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.plan.job import Hyper, Job, Optimizer, Slots, Stage
from edgefl.training.batches import make_batch
from edgefl.training.forward import Auxiliary
from edgefl.training.joint_steps import Halted, Stack, halted, stacked
from edgefl.training.joint_trial import LEAST_GAIN, refusal, trial
from edgefl.training.local_round import Training
from edgefl.training.step import make_optimizer, prepare, train_step

DEVICES = 20
#: (model, optimiser, rows of a batch).
CASES: tuple[tuple[str, Optimizer, int], ...] = (
    *(("sensor", "adamw", rows) for rows in (10, 32, 64)),
    *(("sensor", "sgd", rows) for rows in (10, 32, 64)),
    *(("sensor, default head", "adamw", rows) for rows in (10, 32, 64)),
    ("lenet", "sgd", 10),
    ("lenet", "adamw", 10),
    ("cnn", "sgd", 10),
)
#: Steps of all devices that are timed at once.
STEPS = 3
RATE = 1e-3


class Plain(nn.Module):
    """Logits of complete samples, as one module."""

    def __init__(self, model: StagedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, …] -> [B, classes]."""
        model = self.model
        return model.classify(model.fuse({"x": model.project("x", model.encode("x", x))}))


def spec_of(name: str) -> ModelSpec:
    """The model's specification."""
    if name.startswith("sensor"):
        encoder = EncoderSpec(kind="sensor", input_shape=(32, 6), width=32, depth=3, heads=4, patch=4)
        head = HeadSpec(width=32, out=16)
        if name == "sensor":
            head = msgspec.structs.replace(head, dropout=0.0, norm="layer")
        return ModelSpec({"x": encoder}, 3, head, 16, CLASSES, tuple("abcdefghij"))
    make, width, _, shape = MODELS[name]
    own = encoder_of_size(name_of(edgefl.encoder(make, input_shape=shape)), "tiny", shape)
    head = HeadSpec(kind="none", out=width)
    return ModelSpec({"x": own}, 1, head, width, CLASSES, tuple("abcdefghij"), fusion="mean")


def devices_of(name: str, optimizer: Optimizer, rows: int) -> list[Training]:
    """Devices at the beginning of their steps, with different weights and random samples of one batch."""
    spec = spec_of(name)
    parts = tuple(part_names(spec))
    hyper = Hyper(batch_size=rows, optimizer=optimizer, momentum=0.0, lr={"encoder": RATE, "head": RATE})
    slots = Slots(objective={"cross_entropy": {"weight": 1.0}}, missing={"zero": {}}, prototypes={"none": {}})
    job = Job(spec, Stage(depth=spec.stages, present=parts, trained=parts), hyper, slots)
    made = []
    for device in range(DEVICES):
        draw = np.random.default_rng(device)
        model = build(spec, parts, seed=device)
        prepare(model, parts)
        samples = draw.standard_normal((rows, *spec.encoders["x"].input_shape), np.float32)
        labels, ids = draw.integers(0, CLASSES, rows), [str(n) for n in range(rows)]
        data = Dataset({"x": samples}, {"x": np.ones(rows, bool)}, labels, spec.label_names, ids)
        made.append(Training(job, model, data, np.arange(rows), Auxiliary(), draw, None))
    return made


class Timed(NamedTuple):
    """Processor milliseconds of a device's step in one turn."""

    bare: float
    alone: float
    joint: float


def ways(devices: Sequence[Training], begun: Sequence[Halted]) -> list[Callable[[], object]]:
    """A step of every device: by torch alone, one by one, and jointly."""
    job = devices[0].job
    batches = [make_batch(one.dataset, one.usable, ["x"], "cpu") for one in devices]
    joint_batch = stacked(batches)
    nets = [Plain(one.model) for one in devices]
    kind = torch.optim.SGD if job.hyper.optimizer == "sgd" else torch.optim.AdamW
    bare_optimizers = [kind(net.parameters(), RATE) for net in nets]
    optimizers = [make_optimizer(one.model, job.stage.trained, job.hyper) for one in devices]
    stack = Stack(begun)

    def bare() -> None:
        for place, (net, optimizer) in enumerate(zip(nets, bare_optimizers, strict=True)):
            optimizer.zero_grad()
            logits = net(joint_batch.inputs["x"][place])
            nn.functional.cross_entropy(logits, joint_batch.labels[place]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def alone() -> None:
        for one, batch, optimizer in zip(devices, batches, optimizers, strict=True):
            train_step(one.model, job, batch, optimizer, one.auxiliary)

    def joint() -> None:
        stack.backward(stacked(batches))
        stack.optimizer.step()

    return [bare, alone, joint]


def milliseconds(step: Callable[[], object]) -> float:
    """Processor time of a device's step."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return 1000 * (time.process_time() - began) / STEPS / DEVICES


def row(name: str, optimizer: Optimizer, rows: int, times: int) -> str:
    """A line of the table; the ways take turns."""
    devices = devices_of(name, optimizer, rows)
    if reason := refusal(devices[0]):
        raise SystemExit(f"{name}: {reason}")
    every = [halted(one) for one in devices]
    answer = trial(every)
    if answer.why and not 0 < answer.gain < LEAST_GAIN:
        raise SystemExit(f"{name}: {answer.why}")
    steps = ways(devices, every)
    for step in steps:
        step()
    turns = [Timed(*map(milliseconds, steps)) for _ in range(times)]
    medians = " | ".join(f"{statistics.median(column):.2f}" for column in zip(*turns, strict=True))
    gains, shares = sorted(one.alone / one.joint for one in turns), sorted(one.joint / one.bare for one in turns)
    gain, share = statistics.median(gains), statistics.median(shares)
    return (
        f"| {name} | {optimizer} | {rows} | {medians} | × {gain:.2f} ({gains[0]:.2f} to {gains[-1]:.2f}) "
        f"| × {share:.2f} ({shares[0]:.2f} to {shares[-1]:.2f}) |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--write", type=Path, help="a folder for simulators.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    about = (__doc__ or "").partition("    python")[0].strip()
    lines = [
        f"`python -m benchmarks.cost.joint --times {chosen.times}`, {os.cpu_count()} cores. {about}",
        "",
        "| model | optimiser | rows | bare loop, ms | one by one, ms | joint, ms | gain | joint by bare loop |",
        "|---|---|---|---|---|---|---|---|",
        *(row(*case, chosen.times) for case in CASES),
    ]
    text = "\n".join(lines)
    print(text)
    if chosen.write:
        put(chosen.write / "simulators.md", "Steps of several devices at once", text, head=HEAD)


if __name__ == "__main__":
    main()

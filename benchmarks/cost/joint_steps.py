"""Training steps of a round's devices one after the other, and all at once with stacked weights, in turns.

Stacked by torch.func.vmap. The model of `har_hapt` with layer norm in place of the heads' batch norm: two sensor
encoders of three blocks, 32 wide. Forward, backward and AdamW, one thread, as a study's
worker has it. A step's time is per device. Attention under vmap is torch's plain one (the CPU's fused kernel has no
rule either), or the fused kernel device by device; the better of the two counts. The gradients of
both agree with those taken one by one to rounding, which is checked; the range is that of the turns.

    python -m benchmarks.cost.joint_steps [--times 5] [--write docs/results]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.sections import put
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.models.staged import StagedModel, build
from edgefl.training.optimizers import AdamW, Group

#: Rows of a batch.
BATCHES = (8, 16, 32, 64, 128)
#: Devices of a round.
DEVICES = (6, 12)
#: Steps that are timed at once.
STEPS = 10
#: What gradients, which are below 1, may differ by: some hundred roundings of f32.
ROUNDING = 1e-5


class Fleet(NamedTuple):
    """The models of a round's devices, and a batch of each: inputs[m] [K, B, T, C], labels [K, B]."""

    models: list[StagedModel]
    inputs: dict[str, Tensor]
    labels: Tensor


class Logits(nn.Module):
    """The way of a complete batch through a staged model, as one module: inputs[m] [B, …] -> logits [B, classes]."""

    def __init__(self, model: StagedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Encoders, heads, fusion, classifier."""
        projected = {m: self.model.project(m, self.model.encode(m, x)) for m, x in inputs.items()}
        return self.model.classify(self.model.fuse(projected))


def fleet_of(devices: int, batch: int) -> Fleet:
    """Models with different weights, and random batches."""
    encoder = EncoderSpec(kind="sensor", input_shape=(128, 3), width=32, depth=3, heads=2, patch=16)
    head = HeadSpec(width=64, out=32, dropout=0.0, norm="layer")
    spec = ModelSpec(stages=3, encoders={"acc": encoder, "gyro": encoder}, head=head, classes=6, fusion_width=32)
    models = [build(spec, part_names(spec), seed=seed).train() for seed in range(devices)]
    generator = torch.Generator().manual_seed(1)
    inputs = {m: torch.randn(devices, batch, 128, 3, generator=generator) for m in spec.encoders}
    return Fleet(models, inputs, torch.randint(6, (devices, batch), generator=generator))


def one_by_one(fleet: Fleet) -> tuple[Callable[[], None], list[dict[str, Tensor]]]:
    """A step of every device, and where its gradients are, by name."""
    modules = [Logits(model) for model in fleet.models]
    optimizers = [AdamW((Group(tuple(module.parameters()), 1e-3, 0.0),)) for module in modules]

    def step() -> None:
        for i, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            module.zero_grad(set_to_none=True)
            logits = module({m: x[i] for m, x in fleet.inputs.items()})
            nn.functional.cross_entropy(logits, fleet.labels[i]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step, [dict(module.named_parameters()) for module in modules]


def stacked(
    fleet: Fleet, attention: Callable[[], AbstractContextManager[object]]
) -> tuple[Callable[[], None], dict[str, nn.Parameter]]:
    """A step of all devices at once, and the stacked parameters [K, …]."""
    modules = [Logits(model) for model in fleet.models]
    values, buffers = stack_module_state(modules)
    parameters = {name: nn.Parameter(value.detach().clone()) for name, value in values.items()}
    optimizer = AdamW((Group(tuple(parameters.values()), 1e-3, 0.0),))

    def loss(own: dict[str, Tensor], state: dict[str, Tensor], inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(modules[0], own | state, (inputs,)), labels)

    every = vmap(loss, randomness="different")

    def step() -> None:
        for parameter in parameters.values():
            parameter.grad = None
        with attention():
            every(dict(parameters), buffers, fleet.inputs, fleet.labels).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step, parameters


def difference(devices: int, batch: int, attention: Callable[[], AbstractContextManager[object]]) -> float:
    """The largest difference between the gradients of a first step, taken one by one and stacked."""
    step, alone = one_by_one(fleet_of(devices, batch))
    together, joint = stacked(fleet_of(devices, batch), attention)
    step()
    together()
    found = 0.0
    for name, parameter in joint.items():
        apart = torch.stack([own[name].grad for own in alone])  # type: ignore[misc]
        assert parameter.grad is not None
        found = max(found, float((apart - parameter.grad).abs().max()))
    return found


def plain() -> AbstractContextManager[object]:
    """Attention by two products, which has a rule under vmap."""
    return sdpa_kernel(SDPBackend.MATH)


def milliseconds(step: Callable[[], None], devices: int) -> float:
    """Processor time of a device's step."""
    began = time.process_time()
    for _ in range(STEPS):
        step()
    return 1000 * (time.process_time() - began) / STEPS / devices


def row(devices: int, batch: int, times: int) -> str:
    """A line of the table; the kinds of step take turns."""
    for attention in (plain, nullcontext):
        if (found := difference(devices, batch, attention)) > ROUNDING:
            raise SystemExit(f"{devices} devices, {batch} rows: the gradients differ by {found:.1e}")
    steps = [one_by_one(fleet_of(devices, batch))[0]]
    steps += [stacked(fleet_of(devices, batch), attention)[0] for attention in (plain, nullcontext)]
    for step in steps:
        step()
    turns = [[milliseconds(step, devices) for step in steps] for _ in range(times)]
    alone, by_products, fused = (statistics.median(column) for column in zip(*turns, strict=True))
    ratios = sorted(one / min(others) for one, *others in turns)
    middle = statistics.median(ratios)
    return (
        f"| {devices} | {batch} | {alone:.1f} | {by_products:.1f} | {fused:.1f} "
        f"| × {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
    )


def table(times: int, sizes: Sequence[tuple[int, int]]) -> str:
    """The table in Markdown."""
    head = (
        "| devices | rows | one by one, ms | stacked, plain attention, ms | stacked, fused attention, ms "
        "| gain, median (range) |\n|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(row(devices, batch, times) for devices, batch in sizes)])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    text = table(chosen.times, [(devices, batch) for devices in DEVICES for batch in BATCHES])
    print(text)
    if chosen.write:
        about = (__doc__ or "").partition("    python")[0].strip()
        command = f"`python -m benchmarks.cost.joint_steps --times {chosen.times}`, 2 cores."
        put(chosen.write / "runner.md", "Steps of several devices at once", f"{command} {about}\n\n{text}")


if __name__ == "__main__":
    main()

"""The fleet of a run file as a Flower simulation: FedAvg of the whole model, one Ray actor for each core.

The model, its first weights and optimiser, every device's samples and the test set are EdgeFL's; the rounds, their
messages and the averaging are Flower's. Batches are drawn alike (shuffled, full ones only), but with other random
numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from edgefl.config.profiles import load_run
from edgefl.config.settings import RunConfig
from edgefl.data.dataset import Dataset
from edgefl.data.prepare import prepare_shares
from edgefl.models.checkpoints import initial_parts
from edgefl.models.parts import loaded
from edgefl.models.spec import part_names
from edgefl.models.staged import StagedModel, build
from edgefl.plan.compile import compile_run
from edgefl.plan.job import RunPlan
from edgefl.training.batches import mixed_rows
from edgefl.training.step import make_optimizer, prepare

#: Actors' way to the run file: Ray hands the driver's variables on.
RUN = "EDGEFL_BENCHMARK_RUN"
#: Actors with a core each.
CORES = 2
State = dict[str, Tensor]


@cache
def config() -> RunConfig:
    """The run file."""
    return load_run(yaml.safe_load(Path(os.environ[RUN]).read_text()), ())[0]


@cache
def plan() -> RunPlan:
    """The run as EdgeFL plans it."""
    recipe = load_run(yaml.safe_load(Path(os.environ[RUN]).read_text()), ())[1]
    test = samples("test")
    return compile_run(config(), recipe, run="flower", shapes=test.signature(), label_names=test.label_names)


def shares() -> Path:
    """Folder of the samples, beside the run file."""
    return Path(os.environ[RUN]).with_suffix(".shares")


@cache
def samples(name: str) -> Dataset:
    """Of a device, by its name, or the "test" set, as ``shared`` left them."""
    return Dataset.load_npz(shares() / f"{name}.npz")


def devices() -> list[str]:
    """Their names, in the order of Flower's partitions."""
    return [device.name for device in config().fleet]


def shared() -> None:
    """Share the samples out, as EdgeFL's runs do when they begin."""
    prepare_shares(config().data, devices(), shares(), config().seed)


@cache
def model() -> StagedModel:
    """The one model of a process, whose weights come and go."""
    return build(plan().model, part_names(plan().model))


def logits(rows: Dataset, indices: np.ndarray) -> Tensor:
    """[n, classes] of complete samples."""
    whole = model()
    inputs = {m: torch.from_numpy(values[indices]) for m, values in rows.modalities.items()}
    return whole.classify(whole.fuse({m: whole.project(m, whole.encode(m, x)) for m, x in inputs.items()}))


def train(state: Mapping[str, Tensor], device: int, round_number: int) -> tuple[State, int]:
    """A device's local training: its weights, and how many samples it has."""
    parts, hyper, rows = part_names(plan().model), plan().hypers[-1], samples(devices()[device])
    whole = model()
    whole.load_state_dict(dict(state))
    prepare(whole, parts)
    rng = np.random.default_rng((plan().seed, device, round_number))
    torch.manual_seed(int(rng.integers(2**63)))
    optimizer = make_optimizer(whole, parts, hyper)
    assert rows.labels is not None
    for _ in range(hyper.epochs):
        for indices in mixed_rows(np.arange(len(rows)), hyper.batch_size, rng):
            whole.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(logits(rows, indices), torch.from_numpy(rows.labels[indices])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: value.clone() for name, value in whole.state_dict().items()}, len(rows)


@torch.no_grad()
def accuracy(state: Mapping[str, Tensor]) -> float:
    """Of the test set, 0..1."""
    test = samples("test")
    whole = model()
    whole.load_state_dict(dict(state))
    whole.eval()
    assert test.labels is not None
    right = [
        (logits(test, rows).argmax(dim=1).numpy() == test.labels[rows]).sum()
        for rows in np.array_split(np.arange(len(test)), len(test) // 256 + 1)
    ]
    return float(sum(right)) / len(test)


def first_weights() -> State:
    """As EdgeFL's run begins."""
    parts = dict(initial_parts(plan().model, plan().seed))
    return dict(loaded(plan().model, list(parts), parts).state_dict())


def is_judged(at: int, every: int, rounds: int) -> bool:
    """Whether the test set is judged after round ``at``; Flower also asks before the first, as round 0."""
    return at > 0 and (at % every == 0 or at == rounds)


def simulate(run: Path, out: Path) -> None:
    """Run Flower's simulation of the file ``run``, which is to be judged every so many rounds; writes its accuracy."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    os.environ[RUN] = str(run.resolve())
    shared()
    rounds, every, fleet = sum(stage.rounds for stage in plan().stages), config().evaluate, len(devices())
    assert isinstance(every, int)
    client, server = ClientApp(), ServerApp()
    found: dict[str, Any] = {}

    @client.train()  # type: ignore[untyped-decorator]
    def trained(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        at, device = int(message.content["config"]["server-round"]), int(context.node_config["partition-id"])
        state, samples = train(message.content["arrays"].to_torch_state_dict(), device, at)
        content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": samples})}
        return Message(content=RecordDict(content), reply_to=message)

    def judged(at: int, arrays: ArrayRecord) -> MetricRecord | None:
        if not is_judged(at, every, rounds):
            return None
        found["accuracy"] = accuracy(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": found["accuracy"]})

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, _: Context) -> None:
        torch.set_num_threads(1)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=fleet)
        result = strategy.start(grid, ArrayRecord(first_weights()), num_rounds=rounds, evaluate_fn=judged)
        found["rounds"] = len(result.train_metrics_clientapp)

    backend = {"init_args": {"num_cpus": CORES}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, fleet, backend_config=backend)
    if found.get("rounds") != rounds:
        raise SystemExit(f"Flower has trained in {found.get('rounds', 0)} of {rounds} rounds; its log says why")
    out.write_text(json.dumps(found))

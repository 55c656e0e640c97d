"""Flower's simulation: users of a round in Ray's actors, one for each core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.cost.simulators.task import (
    COHORT,
    USERS,
    Journal,
    Net,
    Samples,
    accuracy,
    asked,
    first_net,
    samples,
    train_user,
)

#: Actors' way to the task: Ray hands the driver's variables on.
FOLDER, MODEL = "SIMULATORS_FOLDER", "SIMULATORS_MODEL"


@cache
def actors_own() -> tuple[Net, Samples]:
    """The one model of an actor, whose weights come and go, and the samples."""
    torch.set_num_threads(1)
    return Net(os.environ[MODEL]), samples(Path(os.environ[FOLDER]), "train", mapped=True)


client, server = ClientApp(), ServerApp()


@client.train()  # type: ignore[untyped-decorator]
def trained(message: Message, context: Context) -> Message:
    """A user's local training."""
    net, train = actors_own()
    user, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    own = train.of_user(user)
    train_user(net, own, np.random.default_rng((user, number)))
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(own.labels)})}
    return Message(content=RecordDict(content), reply_to=message)


class Marked(FedAvg):  # type: ignore[misc]
    """FedAvg that marks the ends of rounds."""

    def __init__(self, journal: Journal) -> None:
        # The share is taken of those that have joined when Flower begins to wait: hence the least number too.
        share, least = COHORT / USERS, {"min_train_nodes": COHORT, "min_available_nodes": USERS}
        super().__init__(fraction_train=share, fraction_evaluate=0.0, **least)
        self.journal = journal

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """See FedAvg."""
        replies = list(replies)
        assert len(replies) == COHORT, len(replies)
        aggregated: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
        self.journal.ended(server_round)
        return aggregated


def main() -> None:
    """The rounds."""
    folder, model, rounds = given = asked()
    os.environ[FOLDER], os.environ[MODEL] = str(folder), model
    net, journal = first_net(folder, model), given.journal

    @server.main()  # type: ignore[untyped-decorator]
    def served(grid: Grid, _: Context) -> None:
        torch.set_num_threads(1)
        result = Marked(journal).start(grid, ArrayRecord(net.state_dict()), num_rounds=rounds.all)
        net.load_state_dict(result.arrays.to_torch_state_dict())
        journal.write(accuracy(net, folder))

    backend = {"init_args": {"num_cpus": os.cpu_count()}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, USERS, backend_config=backend)

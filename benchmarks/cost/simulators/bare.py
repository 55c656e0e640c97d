"""The floor: a loop in torch that trains the users of a round one after the other, and averages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.cost.simulators.task import COHORT, USERS, accuracy, asked, first_net, samples, train_user


@torch.no_grad()
def copy(values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Set the weights to these values."""
    for value, weight in zip(values, weights, strict=True):
        weight.copy_(value)


def main() -> None:
    """The rounds."""
    folder, model, rounds = given = asked()
    journal, net, train = given.journal, first_net(folder, model), samples(folder, "train")
    draw, weights = np.random.default_rng(1), list(net.parameters())
    for number in range(1, rounds.all + 1):
        start = [weight.detach().clone() for weight in weights]
        total = [torch.zeros_like(value) for value in start]
        for user in draw.choice(USERS, COHORT, replace=False):
            copy(start, weights)
            train_user(net, train.of_user(int(user)), draw)
            with torch.no_grad():
                for summed, weight in zip(total, weights, strict=True):
                    summed += weight
        copy([summed / COHORT for summed in total], weights)
        journal.ended(number)
    journal.write(accuracy(net, folder))

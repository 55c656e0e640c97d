"""The floor: a loop in torch that trains the users of a round one after the other, and averages."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.cost.simulators.task import COHORT, USERS, accuracy, asked, first_net, pictures, train_user


def main() -> None:
    """The rounds."""
    folder, model, rounds = given = asked()
    journal, net, train = given.journal, first_net(folder, model), pictures(folder, "train")
    draw, weights = np.random.default_rng(1), list(net.parameters())
    for number in range(1, rounds.all + 1):
        start = [weight.detach().clone() for weight in weights]
        total = [torch.zeros_like(value) for value in start]
        for user in draw.choice(USERS, COHORT, replace=False):
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            train_user(net, train.of_user(int(user)), draw)
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(weights, start))
        with torch.no_grad():
            torch._foreach_copy_(weights, torch._foreach_add(start, torch._foreach_div(total, COHORT)))
        journal.ended(number)
    journal.write(accuracy(net, folder))

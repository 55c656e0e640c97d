"""pfl's simulation (arXiv 2404.06430): one model in one process, users of a round one after the other."""

from __future__ import annotations

import types
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.cost.simulators.task import BATCH, COHORT, RATE, USERS, Journal, accuracy, asked, first_net, samples


class Ends(TrainingProcessCallback):  # type: ignore[misc]
    """Marks the ends of rounds."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def after_central_iteration(self, *_: Any, central_iteration: int, **__: Any) -> tuple[bool, Metrics]:
        """pfl counts from 0; False: go on."""
        self.journal.ended(central_iteration + 1)
        return False, Metrics()


def loss(self: nn.Module, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:  # noqa: A002 - pfl's own name
    """The method that pfl asks a module for."""
    return nn.functional.cross_entropy(self(x), y)


def metrics(self: nn.Module, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:  # noqa: A002
    """The method that pfl evaluates by."""
    return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


def main() -> None:
    """The rounds."""
    folder, model, rounds = given = asked()
    net, train, journal = first_net(folder, model), samples(folder, "train"), given.journal
    for method in (loss, metrics):
        setattr(net, method.__name__, types.MethodType(method, net))
    users = [tuple(train.of_user(user)) for user in range(USERS)]
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(USERS)))
    own = PyTorchModel(
        model=net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds.all, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=own,
        model_train_params=NNTrainHyperParams(local_learning_rate=RATE, local_num_epochs=1, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=500),
        callbacks=[Ends(journal)],
    )
    journal.write(accuracy(net, folder))

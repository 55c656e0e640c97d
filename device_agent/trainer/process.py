"""The trainer's process: a child of the agent that holds torch and the data, warm between rounds.

Served over its pipes (:mod:`edgefl.process.worker`): ``warm`` loads torch and the data and describes them, ``train``
does one round. Parts are read from the object store and put there, by id; only names and numbers cross the pipes.
SIGUSR1 asks it to stop after the step it is in. It never outlives the agent.

Several devices of one machine may share a process (``edgefl run --trainers``), where a torch in each would fill it:
they take turns, each with its own data and object store, until they ``leave``.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from device_agent.core.state import DataFacts, Result
from device_agent.runtime.memory_store import Objects
from device_agent.runtime.trainer_process import TrainerSettings, TrainRequest, WarmRequest
from edgefl.errors import ConfigError, Problem, WorkerError
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Handler, Note, serve
from edgefl.resources.process_memory import give_back_at_once

if TYPE_CHECKING:  # it costs torch, which is loaded once the data is known to be good
    from device_agent.trainer.local_trainer import LocalTrainer
    from edgefl.data.dataset import Dataset
    from edgefl.models.reuse import Models
    from edgefl.training.flop_cache import FlopCounts
    from edgefl.training.local_round import Halting


class Trainers:
    """The trainers of this process by device, and the active ones.

    ``alone``: the process serves one device's trainer only. ``store``: opens its objects, None: on disk. ``share``:
    gives a device's data by its name, None: they are read from its files.
    """

    def __init__(
        self,
        *,
        alone: bool = True,
        store: Callable[[TrainerSettings], Objects] | None = None,
        share: Callable[[str], Dataset] | None = None,
    ) -> None:
        self._alone = alone
        self._share = share
        self._store = store
        self._trainers: dict[TrainerSettings, LocalTrainer] = {}
        self._active: list[LocalTrainer] = []
        self._counts: FlopCounts | None = None  # steps that any device has counted need not be counted again
        self._models: Models | None = None  # of all devices in turn, where the process is not one's alone

    def handlers(self) -> dict[str, Handler]:
        """Request name -> handler of a trainer's process."""
        return {"warm": self.warm, "train": self.train, "leave": self.leave}

    def leave_off(self, signum: int = 0, frame: FrameType | None = None) -> None:
        """End the rounds in progress after their current step; also a signal handler."""
        for trainer in tuple(self._active):
            trainer.left_off = True

    def leave_off_one(self, settings: TrainerSettings) -> None:
        """End a device's round after its current step."""
        for trainer in tuple(self._active):
            trainer.left_off = trainer.left_off or trainer.settings == settings

    def warm(self, body: object, note: Note) -> DataFacts:
        """Load torch and the requesting device's data, once; facts of the data by its preparation.

        Where the request has an offer, load its library's modules; rehearse its round where that is asked for.
        """
        request = msgspec.convert(body, WarmRequest)
        trainer = self._trainer(request.settings)
        facts = trainer.describe(request.preparation)
        if request.offer is not None:
            trainer.load_modules(request.offer)
            if request.rehearse:
                trainer.rehearse(request.offer)
        return facts

    def train(self, body: object, note: Note) -> Result:
        """Train one round of the requesting device."""
        from edgefl.training.local_round import finished

        return finished(self.begin(msgspec.convert(body, TrainRequest), note))

    def begin(self, request: TrainRequest, note: Note, *, together: bool = False) -> Halting[Result]:
        """A round of the requesting device; see ``LocalTrainer.begin``."""
        trainer = self._trainer(request.settings)
        self._active.append(trainer)
        try:
            if not self._alone:  # else they were loaded before, and are no part of the round
                trainer.load_modules(request.offer)
            return (yield from trainer.begin(request, note, together=together))
        finally:
            if self._share is not None and trainer.cache.is_empty:  # its share is at hand for the next round
                self.leave(request.settings, note)
            self._active.remove(trainer)

    def leave(self, body: object, note: Note) -> None:
        """Remove the requesting device's trainer."""
        trainer = self._trainers.pop(msgspec.convert(body, TrainerSettings), None)
        if trainer is not None:
            trainer.let_go()

    def _trainer(self, settings: TrainerSettings) -> LocalTrainer:
        if settings not in self._trainers:
            dataset = None
            if self._share is not None:
                dataset = self._share(settings.device)
            elif not settings.code:
                from edgefl.data.sources import load

                # Before torch is loaded: bad data is found at once.
                dataset = load(settings.data, bad_samples=settings.bad_samples)
            if settings.torch_device == "cuda":
                _check_cuda()
            from device_agent.trainer.local_trainer import LocalTrainer, stored

            if not self._alone and self._models is None:
                from edgefl.models.reuse import Models

                self._models = Models()
            store, counts = self._store or stored, self._counts
            made = LocalTrainer(settings, dataset, counts, alone=self._alone, models=self._models, store=store)
            self._trainers[settings], self._counts = made, made.counts
        return self._trainers[settings]


def _check_cuda() -> None:
    """Raise doctor's finding as an error if torch lacks CUDA; for profiles with cuda.

    ConfigError where no restart mends it; WorkerError for a driver, which may be loaded late in a boot.
    """
    import torch

    if torch.cuda.is_available():
        return
    from device_agent import library_checks
    from device_agent.board import board

    facts = library_checks.TorchFacts(torch.__version__, torch.version.cuda or "")
    fault = library_checks.judge_torch(facts, "cuda", board())
    if fault.id == "torch-no-driver":
        raise WorkerError(fault.detail, remedy=fault.remedy)
    raise ConfigError("the device's profile", [Problem("torch_device", fault.detail)], remedy=fault.remedy)


def main() -> None:
    """Entry of ``python -m device_agent.trainer.process``, started by the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=0)
    # In a long step a closed pipe goes unnoticed.
    die_with_parent(parser.parse_args().parent, signal.SIGKILL, "the trainer")
    give_back_at_once()
    trainers = Trainers()
    signal.signal(signal.SIGUSR1, trainers.leave_off)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the agent decides when this ends
    serve(trainers.handlers())


if __name__ == "__main__":
    main()

"""A trainer process of a simulated fleet: ``python -m edgefl.api.simulated_training RUN HANDED``.

It has the fleet's data as pages of their file, and of each device what its last round left (prefixes of its samples).
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from device_agent.runtime.memory_store import MemoryObjects, Pool
from device_agent.trainer.process import Trainers
from edgefl.api.run_inputs import population_of
from edgefl.api.simulated_trainers import Order, Trained, wanted_objects
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.data.population import ROWS
from edgefl.process.inline_worker import SpacedNotes
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Handler, Note, serve
from edgefl.resources.torch_threads import set_threads
from edgefl.storage.disk import SHARES, write_new


class _Training:
    """Rounds of devices whose objects are files, or come and go with their requests."""

    def __init__(self, run: Path, handed: Path) -> None:
        self._handed = handed
        self._pool = Pool(run / "objects", handed)
        self.trainers = Trainers(
            alone=False, store=lambda settings: self._pool.stores[settings.device], share=_shares(run)
        )

    def handlers(self) -> dict[str, Handler]:
        """Those of a trainer's process."""
        return {**self.trainers.handlers(), "train": self.train}

    def train(self, body: object, note: Note) -> Trained:
        """Train one round of the requesting device."""
        order = msgspec.convert(body, Order)
        request, settings = order.request, order.request.settings
        store = MemoryObjects(Path(settings.store), settings.budget.disk_bytes, self._pool)
        store.sizes = dict(order.has)
        # Now, since the coordinator may delete them; objects that the last device had as well are in memory.
        for name in wanted_objects(request) & store.sizes.keys():
            store.read(name)
        self._pool.stores = {settings.device: store}
        notes = SpacedNotes(note)
        result = self.trainers.train(request, notes)
        for said in notes.waiting:
            note(said)
        made = {name: size for name, size in store.sizes.items() if name not in order.has}
        for name in made.keys() - {ref.id for ref in request.offer.manifest.values()}:  # which the coordinator has
            write_new(self._handed / name, store.read(name), durable=False)
        return Trained(result, made, tuple(order.has.keys() - store.sizes.keys()))


def _shares(run: Path) -> Callable[[str], Dataset] | None:
    """Function from a device's name to its share; None where shares are files of their own."""
    if not (run / SHARES / ROWS).is_file():
        return None
    population = population_of(load_run(str(run / "run.yaml"))[0], run / SHARES, mapped=True)
    return None if population is None else lambda device: population.share(device).as_saved()


def main() -> None:
    """Serve until the fleet's process closes the pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("run", type=Path)
    parser.add_argument("handed", type=Path)
    chosen = parser.parse_args()
    die_with_parent(chosen.parent, signal.SIGKILL, "a trainer process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the fleet's process decides
    training = _Training(chosen.run, chosen.handed)
    signal.signal(signal.SIGUSR1, training.trainers.leave_off)
    set_threads(1)  # as in the fleet's process
    serve(training.handlers())


if __name__ == "__main__":
    main()

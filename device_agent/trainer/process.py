"""The trainer: a child process of the agent that holds torch and the data, warm between rounds.

Served over its pipes (:mod:`edgefl.process.worker`): ``warm`` loads torch and the data and describes them,
``train`` does one round. Parts are read from the object store and put there, by id; only names and numbers cross the
pipes. SIGUSR1 asks it to stop after the step it is in. It never outlives the agent.
"""

from __future__ import annotations

import argparse
import functools
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from device_agent.core.state import DataFacts, Result
from device_agent.runtime.trainer_process import TrainRequest
from edgefl.errors import DataError, EdgeFLError, MissingDependencyError, PrecisionError, StoreError
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, is_scheduled, part_names
from edgefl.plan.job import Hyper, Job, Slots, Stage
from edgefl.plan.stages import RESIDUAL
from edgefl.process.parent_death import die_with_parent
from edgefl.process.worker import Note, serve
from edgefl.records import METHOD, Budget, Figure, Figures, Manifest, Refusal
from edgefl.resources.gpu_memory import give_back, gpu_ceiling, memory_refusal, out_of_memory
from edgefl.resources.process_memory import give_back_at_once

if TYPE_CHECKING:  # what costs torch or numpy is imported when it is needed
    from edgefl.data.dataset import Dataset
    from edgefl.resources.gpu_memory import CudaCeiling
    from edgefl.resources.memory_probe import MemoryProbe
    from edgefl.resources.sensors import EnergyProbe
    from edgefl.storage.objects import ObjectStore
    from edgefl.training.batches import Split
    from edgefl.training.flop_cache import FlopCounts
    from edgefl.training.local_round import RoundResult, Tensors
    from edgefl.training.prefix_cache import PrefixCache

#: Data smaller than this stays in memory: reading it from a file would save less than it costs.
SMALL_BYTES = 16 * 2**20


class AbandonedError(EdgeFLError):
    """The agent does not want this round any more."""


class Trainer:
    """The handlers and what stays warm between them: the data, and what the frozen prefix makes of it."""

    def __init__(self, data: str, bad_samples: str, store: Path, device: str, budget: Budget | None = None) -> None:
        self.data = data
        self.bad_samples = bad_samples
        self.store = store
        self.device = device
        self.budget = budget or Budget()
        self.disk_bytes = self.budget.disk_bytes  # for objects and rows together; None: no limit
        self.ceiling: CudaCeiling | None = None  # of the round under way, on a GPU
        self.rows = store.parent / "rows"  # samples and what frozen parts make of them, in files without names
        self.cache: PrefixCache | None = None
        self.dataset: Dataset | None = None
        self.read_for: object = None  # the (encoders, label names) the files were last read for
        self.split: tuple[object, Split] | None = None  # what it was made of and for, and the data as rounds take it
        self.completed: dict[str, float] = {}  # what the recipe's generator made of it, as metrics
        self.facts = DataFacts()
        self.left_off = False
        self.frozen = False
        self.counts: FlopCounts | None = None

    def _counts(self) -> FlopCounts:
        from edgefl.training.flop_cache import FlopCounts

        self.counts = self.counts or FlopCounts()
        return self.counts

    def leave_off(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: the next report of progress ends the round."""
        self.left_off = True

    def warm(self, body: object = None, note: Note | None = None) -> DataFacts:
        """Load torch and the data, once; what they are."""
        self._loaded()
        return self.facts

    def _loaded(self) -> Dataset:
        if self.dataset is None:
            dataset = _load(self.data, self.bad_samples)  # first: bad data is found before torch takes its seconds
            self.device = device = _torch_device(self.device)
            _first_round(device)
            self.dataset = self._on_disk(dataset)
            self.facts = _facts(self.dataset, device, elastic=Path(self.data).is_dir())
        return self.dataset

    def train(self, body: object, note: Note) -> Result:
        """One round. A share that does not fit, or memory that does not suffice, is a refusal, not an error."""
        self.left_off = False
        request = msgspec.convert(body, TrainRequest)
        if lacking := _lacking(request.offer.job):
            return Result(refusal=Refusal(METHOD, detail=lacking))
        self.warm()
        try:
            self.ceiling = gpu_ceiling(self.device, self.budget, self.facts.base_bytes)
            self._hold()
            return self._train(request, note)
        except DataError as error:
            return Result(refusal=Refusal("data", detail=error.message))
        except PrecisionError as error:
            return Result(refusal=Refusal("cache", detail=error.message))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return Result(refusal=memory_refusal(error, self.ceiling, card=self.facts.gpu_memory_bytes > 0))
        finally:
            self.ceiling = None
            give_back(self.device)
            if not self.frozen:  # what libraries have made by now would be searched for garbage in every round
                gc.freeze()
                self.frozen = True

    def _train(self, request: TrainRequest, note: Note) -> Result:
        from device_agent.trainer.compression import compress_update, decompress_offer
        from edgefl.protocol.tensors import encode_part
        from edgefl.resources.memory_probe import MemoryProbe
        from edgefl.resources.sensors import EnergyProbe
        from edgefl.storage.objects import ObjectStore
        from edgefl.training.batches import no_label, usable_rows
        from edgefl.training.local_round import LocalState, train_round

        job, attempt = request.offer.job, request.offer.attempt
        data = self._split(job, request.device)
        usable = len(usable_rows(job, data.train))
        if usable < job.hyper.batch_size:
            detail = "the local share does not fill one batch"
            few = Refusal("data", float(job.hyper.batch_size), float(usable), "samples", detail)
            return Result(refusal=no_label(job, data.train) or few)
        store = ObjectStore(self.store, self.disk_bytes, durable=False)
        kept = _StoredParts(request.retained, store)
        give_back_at_once(in_pieces=job.hyper.micro_batch > 0)
        memory, energy = MemoryProbe(self.device), EnergyProbe(self.device)
        with energy, memory:
            refusal = decompress_offer(request.offer, store)
            if refusal is not None:
                return Result(refusal=refusal)
            outcome = train_round(
                job,
                data.train,
                _StoredParts(request.offer.manifest, store),
                LocalState(
                    data.holdout,
                    kept,
                    self.device,
                    self._counts(),
                    self._prefixes(data, request.offer.manifest, store),
                ),
                # Not the attempt: a round that is tried again gives the same result.
                salt=f"{request.device}/{attempt.stage}/{attempt.round}",
                on_progress=self._progress(note),
            )
            self._hold()  # the model is gone, and what is sent comes into the process
            staying = {name: store.put(encode_part(tensors)) for name, tensors in outcome.kept.items()}
            outcome.kept.clear()
            sending = compress_update(job, outcome.parts, request.offer.manifest, kept, store)
        waiting = {
            key: ref
            for key, ref in request.retained.items()
            if key.startswith(RESIDUAL) and key.removeprefix(RESIDUAL) not in sending.manifest
        }
        return Result(
            manifest=sending.manifest,
            samples=outcome.samples,
            metrics=outcome.metrics | self.completed,
            figures=_figures(outcome, memory, energy),
            complete=outcome.complete,
            poverty=outcome.poverty,
            poverty_change=outcome.poverty_change,
            retained=staying | sending.residuals | waiting,
        )

    def _prefixes(self, data: Split, manifest: Manifest, store: ObjectStore) -> PrefixCache:
        """The stored prefixes of this share, within what objects leave of the disk budget."""
        import numpy as np

        from edgefl.training.prefix_cache import PrefixCache

        self.cache = self.cache or PrefixCache(self.rows)
        self.cache.keep_only(list(data))
        self.cache.check = self._check
        self.cache.identify = lambda part: manifest[part].id
        if self.disk_bytes is not None:
            on_disk = [rows for rows in self._loaded().modalities.values() if not isinstance(rows, np.ndarray)]
            raw = sum(rows.nbytes for rows in on_disk)
            self.cache.limit_bytes = self.disk_bytes - store.used_bytes() - raw
        return self.cache

    def _on_disk(self, dataset: Dataset) -> Dataset:
        """Large data in a file, so that it does not fill the memory of training; in memory where the disk is short."""
        from dataclasses import replace

        from edgefl.data.arrays import on_disk

        size = sum(values.nbytes for values in dataset.modalities.values())
        if size < SMALL_BYTES or (self.disk_bytes is not None and size > self.disk_bytes // 2):
            return dataset
        try:
            return replace(dataset, modalities={m: on_disk(v, self.rows) for m, v in dataset.modalities.items()})
        except StoreError as error:
            sys.stderr.write(f"the data stays in memory: {error.message}\n")
            return dataset

    def _dataset_for(self, model: ModelSpec) -> Dataset:
        """The data as this model takes it: labels numbered its way; files read to its shapes. Raises DataError."""
        names, dataset = model.label_names, self._loaded()
        if not self.facts.elastic:
            return dataset.relabelled(names) if names else dataset
        if self.read_for != (model.encoders, names):
            here = {m: spec for m, spec in model.encoders.items() if m in self.facts.modalities}
            self.split = None
            self.dataset = dataset = self._on_disk(_load(self.data, self.bad_samples, here, names))
            self.read_for = (model.encoders, names)
        return dataset

    def _split(self, job: Job, device: str) -> Split:
        """Training and hold-out data; absent modalities of the former made by the recipe's generator.

        Made once, then kept. Raises DataError.
        """
        from edgefl.training.batches import split

        dataset = self._dataset_for(job.model)
        # A data set is equal to itself only: one that was read again makes a new share.
        drawn = (job.hyper.holdout, job.hyper.seed, job.hyper.batch_size)
        wanted = (self.dataset, device, job.model.encoders, job.model.label_names, drawn, job.slots)
        if self.split is None or self.split[0] != wanted:
            self.split = None  # the old one goes before the new one comes, and what was made of it
            if self.cache is not None:
                self.cache.keep_only([])
            fresh = split(job, dataset, device)
            own, self.completed = _completed(fresh.train, job)
            self.split = (wanted, fresh._replace(train=self._on_disk(own)))
        return self.split[1]

    def _check(self) -> None:
        if self.left_off:
            raise AbandonedError("left off: the agent does not want this round any more")

    def _hold(self) -> None:
        if self.ceiling is not None:
            self.ceiling.hold()

    def _progress(self, note: Note) -> Callable[[int, int, int, float], None]:
        def report(epoch: int, step: int, steps: int, loss: float) -> None:
            self._check()
            self._hold()
            note({"epoch": epoch, "step": step, "steps": steps, "loss": loss})

        return report


class _StoredParts(Mapping[str, "Tensors"]):
    """Parts decoded when they are asked for, so that never two copies of a whole model are in memory."""

    def __init__(self, manifest: Manifest, store: ObjectStore) -> None:
        self._manifest = manifest
        self._store = store

    def __getitem__(self, name: str) -> Tensors:
        from edgefl.protocol.tensors import decode_part

        # What goes into a model, or onto it, is read where it lies; the rest is copied.
        own = not is_scheduled(name.removeprefix(RESIDUAL))
        return decode_part(self._store.read(self._manifest[name].id), copy=own)

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest)

    def __len__(self) -> int:
        return len(self._manifest)

    def __contains__(self, name: object) -> bool:
        return name in self._manifest  # the inherited one would read the part


def _torch_device(wanted: str) -> str:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "train") from error
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _lacking(job: Job) -> str:
    """Which methods and kinds of encoder the job names that are not installed here, in words; "": none."""
    from edgefl.encoder_kinds import kinds_not_installed
    from edgefl.registry import Recipe, not_installed

    slots = job.slots
    named = {"objective": slots.objective, "missing": slots.missing, "prototypes": slots.prototypes}
    shape: Recipe = {"fusion": {job.model.fusion: {}}, "sharing": {job.model.encoder_sharing: {}}}
    methods = not_installed({**named, **shape, "repair": slots.repair}, job.signature)
    kinds = kinds_not_installed(encoder.kind for encoder in job.model.encoders.values())
    return "; ".join(filter(None, (methods, kinds and f"on this device: {kinds}")))


@functools.cache
def _first_round(device: str) -> None:
    """Train a toy round, so that the libraries take now what they take once: it belongs to the idle size, to no round.

    Measured with torch 2.13 on a CPU: 229 MiB after importing torch and edgefl.training, 253 MiB after a first round.
    """
    import numpy as np

    from edgefl.data.dataset import Dataset
    from edgefl.models.checkpoints import initial_parts
    from edgefl.training.local_round import LocalState, train_round

    sensor = EncoderSpec(input_shape=(8, 1), width=8, depth=1, heads=2, patch=4)
    model = ModelSpec({"toy": sensor}, stages=1, head=HeadSpec(width=8, out=4), fusion_width=8, classes=2)
    names = tuple(part_names(model))
    job = Job(model, Stage(1, 1, 1, names, names), Hyper(batch_size=4), Slots())
    values, present, labels = np.zeros((4, 8, 1), np.float32), np.ones(4, np.bool_), np.array([0, 1, 0, 1])
    toy = Dataset({"toy": values}, {"toy": present}, labels, ("a", "b"), ["1", "2", "3", "4"])
    train_round(job, toy, dict(initial_parts(model)), LocalState(device=device))


def _load(
    source: str, bad_samples: str, encoders: Mapping[str, EncoderSpec] | None = None, label_names: tuple[str, ...] = ()
) -> Dataset:
    from edgefl.data.sources import load

    return load(source, bad_samples=bad_samples, modalities=encoders, label_names=label_names)


def _completed(dataset: Dataset, job: Job) -> tuple[Dataset, dict[str, float]]:
    """The data completed by the recipe's generator, and its metrics; shortcomings are written to stderr."""
    from edgefl.registry import chosen

    missing = chosen("missing", job.slots.missing)[0]
    if missing.method.completed_data is None:
        return dataset, {}
    done = missing.bind(missing.method.completed_data)(dataset, job.model.encoders)
    if reason := done.reason():
        sys.stderr.write(f"{reason}\n")
    return done.dataset, done.metrics()


def _facts(dataset: Dataset, device: str, *, elastic: bool) -> DataFacts:
    import torch

    from edgefl.resources.gpu_memory import gpu_of
    from edgefl.resources.process_memory import idle_rss_bytes

    give_back(device)
    gpu = gpu_of(torch.cuda, device) if device.startswith("cuda") else None
    card = gpu if gpu is not None and not gpu.shared else None
    held = torch.cuda.memory_reserved(device) if gpu is not None else 0
    return DataFacts(
        modalities={m: () if m in dataset.resizable else shape for m, shape in dataset.signature().items()},
        samples=dataset.samples(),
        class_counts=dataset.class_counts(),
        label_names=tuple(dataset.label_names),
        skipped=len(dataset.skipped),
        elastic=elastic,
        base_bytes=idle_rss_bytes() + (held if card is None else 0),
        runtime=f"torch {torch.__version__}",
        gpu=gpu.name if gpu is not None else "",
        gpu_memory_bytes=card.total_bytes if card is not None else 0,
        torch_device=device,
        gpu_free_bytes=card.free_bytes if card is not None else 0,
        gpu_idle_bytes=held,
    )


def _figures(outcome: RoundResult, memory: MemoryProbe, energy: EnergyProbe) -> Figures:
    from edgefl.resources.sensors import temperature

    return {
        **memory.figures(),
        "energy_j": energy.figure(),
        "temperature_c": temperature(),
        "flops": Figure(outcome.flops, "counted", "torch FlopCounterMode"),
        **(
            {"filling_flops": Figure(outcome.cache_fill_flops, "counted", "torch FlopCounterMode")}
            if outcome.cache_fill_flops
            else {}
        ),
        "compute_s": Figure(outcome.compute_s, "measured", "monotonic clock around the steps"),
    }


def main() -> None:
    """``python -m device_agent.trainer.process``, started by the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--bad-samples", default="error")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--budget", default="{}", help="JSON")
    parser.add_argument("--parent", type=int, default=0)
    options = parser.parse_args()
    die_with_parent(options.parent, signal.SIGKILL, "the trainer")  # in a long step a closed pipe goes unnoticed
    give_back_at_once()
    budget = msgspec.json.decode(options.budget, type=Budget)
    trainer = Trainer(options.data, options.bad_samples, options.store, options.device, budget)
    signal.signal(signal.SIGUSR1, trainer.leave_off)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the agent decides when this ends
    serve({"warm": trainer.warm, "train": trainer.train})


if __name__ == "__main__":
    main()

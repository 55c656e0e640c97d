"""Local training of a device: data kept between rounds, one round at a time, measured cost. Loads torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import torch

from device_agent.core.state import DataFacts, Result
from device_agent.runtime.memory_store import Objects
from device_agent.runtime.trainer_process import TrainerSettings, TrainRequest, library_encoders
from device_agent.trainer.data_facts import data_facts, described
from device_agent.trainer.exchanged_parts import StoredParts, compress_update, decompress_offer, waiting_residuals
from device_agent.trainer.first_round import first_round, freeze_once, rehearse
from device_agent.trainer.own_code import OwnCode, load_code, round_of
from device_agent.trainer.round_figures import round_figures
from edgefl.budget.stage_cost import modules_bytes
from edgefl.data.arrays import on_disk
from edgefl.data.dataset import Dataset
from edgefl.data.sources import has_manifest, load
from edgefl.encoder_kinds import kinds_not_installed
from edgefl.errors import DataError, EdgeFLError, PrecisionError, StoreError, TrainingCodeError
from edgefl.models.adapter import cut_of
from edgefl.models.reuse import Models
from edgefl.models.spec import EncoderSpec, ModelSpec
from edgefl.plan.job import Job, Preparation
from edgefl.plan.training_samples import is_rehearsed
from edgefl.process.worker import Note
from edgefl.protocol.messages import Offer
from edgefl.protocol.tensors import encode_part
from edgefl.records import METHOD, Manifest, Refusal
from edgefl.registry import Recipe, chosen, not_installed
from edgefl.resources.gpu_memory import CudaCeiling, give_back, gpu_ceiling, gpu_of, memory_refusal, out_of_memory
from edgefl.resources.memory_probe import MemoryProbe, NotMeasured
from edgefl.resources.process_memory import idle_rss_bytes, trim
from edgefl.resources.sensors import EnergyProbe
from edgefl.storage.disk import sync_files
from edgefl.storage.objects import ObjectStore
from edgefl.training.batches import Split, no_label, split, usable_rows
from edgefl.training.exchanged_layers import between
from edgefl.training.flop_cache import FlopCounts, shapes_of
from edgefl.training.local_round import (
    AbandonedError,
    Halting,
    LocalState,
    OnProgress,
    RoundResult,
    begin_round,
    finished,
)
from edgefl.training.prefix_cache import PrefixCache

#: Data smaller than this stays in memory: reading it from a file would save less than it costs.
SMALL_BYTES = 16 * 2**20
#: What EdgeFL knows of the data that the owner's own code reads.
NO_DATA = Dataset({}, {}, None, (), [])
#: Models, methods and optimisers that this process has rehearsed, in one of their stages.
_REHEARSED: set[bytes] = set()
#: Why there is no figure of memory where a trainer has no process of its own.
SHARED = "the whole fleet is in one process"

#: Why there is no figure of energy where steps of several devices are one.
TOGETHER = "several devices train together"

#: Opens a device's objects.
MakeStore = Callable[[TrainerSettings], Objects]


def stored(settings: TrainerSettings) -> ObjectStore:
    """A device's objects on disk."""
    return ObjectStore(Path(settings.store), settings.budget.disk_bytes, durable=False)


class LocalTrainer:
    """One device's trainer with its warm data and prefix cache.

    ``dataset``: as read from ``settings.data``; None: the owner's own code reads it, and trains. ``counts``: of steps,
    shared with other trainers in this process. ``alone``: the process serves this trainer only, so that its memory is
    measured and given back; else ``models`` are those that all its trainers use in turn. ``store``: opens the objects.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        dataset: Dataset | None,
        counts: FlopCounts | None = None,
        *,
        alone: bool = True,
        models: Models | None = None,
        store: MakeStore = stored,
    ) -> None:
        self.settings = settings
        self.alone = alone
        self.models = models
        self.store = store
        self.counts = counts or FlopCounts()
        self.device = settings.torch_device
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.disk_bytes = settings.budget.disk_bytes  # for objects and rows together; None: no limit
        self.ceiling: CudaCeiling | None = None  # of the round under way, on a GPU
        # Samples and what frozen parts make of them, in files without names.
        self.rows = Path(settings.store).parent / "rows"
        self.cache = PrefixCache(self.rows)
        self.cache.check = self._check
        self.code = load_code(settings.code) if dataset is None else None
        self.dataset = NO_DATA if dataset is None else dataset
        self.read_for: object = None  # the (encoders, label names) the files were last read for
        self.split: tuple[object, Split] | None = None  # what it was made of and for, and the data as rounds take it
        self.completed: dict[str, float] = {}  # what the recipe's generator made of it, as metrics
        self.facts: DataFacts | None = None
        self.left_off = False  # the agent does not want the round under way any more

    def warm(self) -> DataFacts:
        """Facts on the data and on idle memory, after a toy round."""
        if self.facts is None:
            if self.alone:
                first_round(self.device)
            elastic = self.code is None and has_manifest(self.settings.data)
            # Files are read again, to a model's shapes, inside a round and under its ceiling: the room is the base's.
            as_read = self.dataset if elastic else None
            self.dataset = self._on_disk(self.dataset)
            facts = _facts(self.dataset, self.device, elastic=elastic, alone=self.alone)
            self.facts = facts if self.code is None else msgspec.structs.replace(facts, samples={}, code=self.code.name)
            del as_read
        return self.facts

    def describe(self, preparation: Preparation) -> DataFacts:
        """Facts on the data as read by a run's ``preparation``; for unusable data the reason."""
        base = self.warm()
        if self.code is not None:
            return msgspec.structs.replace(base, prepared=preparation.id)
        return described(base, preparation, lambda here: self._read(here, ()) if base.elastic else self.dataset)

    def load_modules(self, offer: Offer) -> None:
        """Load a library's modules of the offer's model, once in a process."""
        for encoder in library_encoders(offer):
            cut_of(encoder)

    def rehearse(self, offer: Offer) -> None:
        """Rehearse a round of the offer's method, once in a process.

        Errors go to the log, and are left to the round itself.
        """
        job = offer.job
        kind = msgspec.msgpack.encode((shapes_of(job.model), job.slots, job.hyper.optimizer))
        weights = [offer.manifest[part].size for part in job.stage.present if part in offer.manifest]
        if not self.alone or self.code is not None or kind in _REHEARSED or not is_rehearsed(job, sum(weights)):
            return
        _REHEARSED.add(kind)
        facts = self.warm()
        try:
            self.ceiling = gpu_ceiling(self.device, self.settings.budget, facts.base_bytes)
            self._hold()
            self._rehearse(offer)
        except (EdgeFLError, MemoryError, RuntimeError) as error:
            sys.stderr.write(f"a round was not rehearsed: {error}\n")
        finally:
            self.ceiling = None
            give_back(self.device)

    def _rehearse(self, offer: Offer) -> None:
        job, store = offer.job, stored(self.settings)
        data = self._share(job)
        if isinstance(data, Refusal) or decompress_offer(offer, store) is not None:
            return
        parts = rehearse(job, data, StoredParts(offer.manifest, store), self.device, self.rows)
        before = set(store.root.iterdir())
        made = compress_update(job, parts, offer.manifest, {}, store)
        for ref in {*made.manifest.values(), *made.residuals.values()}:
            if (path := store.path(ref.id)) not in before:
                path.unlink(missing_ok=True)

    def train(self, request: TrainRequest, note: Note) -> Result:
        """Train one round. Unfit data or short memory is a refusal, not an error."""
        return finished(self.begin(request, note))

    def begin(self, request: TrainRequest, note: Note, *, together: bool = False) -> Halting[Result]:
        """``train``, halting before the steps. ``together``: others are trained before it goes on."""
        self.left_off = False
        if lacking := _lacking(request.offer.job):
            return Result(refusal=Refusal(METHOD, detail=lacking))
        facts = self.warm()
        try:
            self.ceiling = gpu_ceiling(self.device, self.settings.budget, facts.base_bytes)
            self._hold()
            return (yield from self._train(request, note, together=together))
        except DataError as error:
            return Result(refusal=Refusal("data", detail=error.message))
        except PrecisionError as error:
            return Result(refusal=Refusal("cache", detail=error.message))
        except TrainingCodeError as error:
            return Result(refusal=Refusal("error", detail=f"{error.message}. {error.remedy}"[:500]))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return Result(refusal=memory_refusal(error, self.ceiling, card=facts.gpu_memory_bytes > 0))
        finally:
            self.ceiling = None
            if self.alone:
                give_back(self.device)
                freeze_once()

    def let_go(self) -> None:
        """Replace the prefix cache, to break a reference cycle hidden from garbage collection."""
        self.cache = PrefixCache(self.rows)

    def _train(self, request: TrainRequest, note: Note, *, together: bool) -> Halting[Result]:
        job = request.offer.job
        data = self._share(job) if self.code is None else self.code
        if isinstance(data, Refusal):
            return Result(refusal=data)
        store = self.store(self.settings)
        kept = StoredParts(request.retained, store)
        memory = MemoryProbe(self.device) if self.alone else NotMeasured(SHARED)
        energy = NotMeasured(TOGETHER) if together else EnergyProbe(self.device)
        try:
            with energy, memory:
                refusal = decompress_offer(request.offer, store)
                if refusal is not None:
                    return Result(refusal=refusal)
                outcome = yield from self._round(request.offer, data, store, kept, self._progress(note))
                self._hold()  # the model is gone, and what is sent comes into the process
                staying = {name: store.put(encode_part(tensors)) for name, tensors in outcome.kept.items()}
                outcome.kept.clear()
                if isinstance(store, ObjectStore) and between(
                    job
                ):  # the next round starts from these, and only this device has them
                    sync_files([store.path(ref.id) for ref in staying.values()])
                trim()
                sending = compress_update(job, outcome.parts, request.offer.manifest, kept, store)
        except AbandonedError as error:
            figures = round_figures(error, error.steps, memory, energy, own=self.code is not None)
            return Result(refusal=Refusal("abandoned", detail=error.message), figures=figures)
        return Result(
            manifest=sending.manifest,
            samples=outcome.samples,
            metrics=outcome.metrics | self.completed,
            figures=round_figures(outcome, None, memory, energy, own=self.code is not None),
            observed=outcome.observed,
            retained=staying | sending.residuals | waiting_residuals(job.stage, request.retained, sending.manifest),
        )

    def _share(self, job: Job) -> Split | Refusal:
        """The data of a round; a refusal where it does not fill one batch. Raises DataError."""
        data = self._split(job)
        usable = len(usable_rows(job, data.train))
        if usable >= job.hyper.batch_size:
            return data
        detail = "the local share does not fill one batch"
        few = Refusal("data", float(job.hyper.batch_size), float(usable), "samples", detail)
        return no_label(job, data.train) or few

    def _round(
        self, offer: Offer, data: Split | OwnCode, store: Objects, kept: StoredParts, on_progress: OnProgress
    ) -> Halting[RoundResult]:
        """Train the parts received, by EdgeFL on ``data`` or by the owner's code."""
        job, parts = offer.job, StoredParts(offer.manifest, store)
        # Not the attempt: a round that is tried again gives the same result.
        salt = f"{self.settings.device}/{offer.attempt.stage}/{offer.attempt.round}"
        if isinstance(data, OwnCode):
            here = round_of(job, offer.attempt, parts, salt)
            here.device, here.data, here.on_step = self.device, self.settings.data, on_progress
            return data.round(job, here, kept)
        cache = self._prefixes(data, offer.manifest, store)
        local = LocalState(data.holdout, kept, self.device, self.counts, cache, self.models)
        return (yield from begin_round(job, data.train, parts, local, salt=salt, on_progress=on_progress))

    def _prefixes(self, data: Split, manifest: Manifest, store: Objects) -> PrefixCache:
        """The prefix cache of this share, within the disk budget left by objects."""
        self.cache.keep_only(list(data))
        self.cache.identify = lambda part: manifest[part].id
        if self.disk_bytes is not None:
            raw = sum(rows.nbytes for rows in self.dataset.modalities.values() if not isinstance(rows, np.ndarray))
            self.cache.limit_bytes = self.disk_bytes - store.used_bytes() - raw
        return self.cache

    def _on_disk(self, dataset: Dataset) -> Dataset:
        """The dataset with large arrays moved to disk; unchanged if small or if the disk is short."""
        size = sum(values.nbytes for values in dataset.modalities.values())
        if size < SMALL_BYTES or (self.disk_bytes is not None and size > self.disk_bytes // 2):
            return dataset
        try:
            return replace(dataset, modalities={m: on_disk(v, self.rows) for m, v in dataset.modalities.items()})
        except StoreError as error:
            sys.stderr.write(f"the data stays in memory: {error.message}\n")
            return dataset

    def _dataset_for(self, model: ModelSpec) -> Dataset:
        """The data for this model: labels by its numbering, files read to its shapes. Raises DataError."""
        names, facts = model.label_names, self.warm()
        if not facts.elastic:
            return self.dataset.relabelled(names) if names else self.dataset
        if self.read_for != (model.encoders, names):
            here = {m: spec for m, spec in model.encoders.items() if m in facts.modalities}
            self.split = None
            self.dataset = self._on_disk(self._read(here, names))
            self.read_for = (model.encoders, names)
        return self.dataset

    def _read(self, encoders: Mapping[str, EncoderSpec], names: tuple[str, ...]) -> Dataset:
        source, bad_samples = self.settings.data, self.settings.bad_samples
        return load(source, bad_samples=bad_samples, modalities=encoders, label_names=names)

    def _split(self, job: Job) -> Split:
        """Training and hold-out data, with absent modalities in training data completed by the recipe's generator.

        Made once, then kept. Raises DataError.
        """
        dataset = self._dataset_for(job.model)
        # A data set is equal to itself only: one that was read again makes a new share.
        drawn = (job.hyper.holdout, job.hyper.seed, job.hyper.batch_size)
        wanted = (self.dataset, job.model.encoders, job.model.label_names, drawn, job.slots)
        if self.split is None or self.split[0] != wanted:
            self.split = None  # the old one goes before the new one comes, and what was made of it
            self.cache.keep_only([])
            fresh = split(job, dataset, self.settings.device)
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


def _lacking(job: Job) -> str:
    """Text on the job's methods and encoder kinds not installed here; "" for none."""
    slots = job.slots
    named = {"objective": slots.objective, "missing": slots.missing, "prototypes": slots.prototypes}
    named |= {"repair": slots.repair, "upload": slots.upload}
    shape: Recipe = {"fusion": {job.model.fusion: {}}, "sharing": {job.model.encoder_sharing: {}}}
    methods = not_installed({**named, **shape}, job.signature)
    kinds = kinds_not_installed(encoder.kind for encoder in job.model.encoders.values())
    absent = modules_bytes(job.model) > 0 and find_spec("transformers") is None
    library = "transformers is not installed, whose modules an encoder is made of" if absent else ""
    return "; ".join(filter(None, (methods, *(f"on this device: {one}" for one in (kinds, library) if one))))


def _completed(dataset: Dataset, job: Job) -> tuple[Dataset, dict[str, float]]:
    """The data completed by the recipe's generator, and its metrics; shortcomings are written to stderr."""
    missing = chosen("missing", job.slots.missing)[0]
    if missing.method.completed_data is None:
        return dataset, {}
    done = missing.bind(missing.method.completed_data)(dataset, job.model.encoders)
    if reason := done.reason():
        sys.stderr.write(f"{reason}\n")
    return done.dataset, done.metrics()


def _facts(dataset: Dataset, device: str, *, elastic: bool, alone: bool) -> DataFacts:
    if alone:
        give_back(device)
    gpu = gpu_of(torch.cuda, device) if device.startswith("cuda") else None
    card = gpu if gpu is not None and not gpu.shared else None
    held = torch.cuda.memory_reserved(device) if gpu is not None else 0
    return DataFacts(
        **data_facts(dataset),
        elastic=elastic,
        base_bytes=idle_rss_bytes() + (held if card is None else 0) if alone else 0,
        runtime=f"torch {torch.__version__}",
        gpu=gpu.name if gpu is not None else "",
        gpu_memory_bytes=card.total_bytes if card is not None else 0,
        torch_device=device,
        gpu_free_bytes=card.free_bytes if card is not None else 0,
        gpu_idle_bytes=held,
    )

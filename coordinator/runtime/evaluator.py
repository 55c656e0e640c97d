"""The coordinator's worker: everything that needs torch, in a process of its own.

``python -m coordinator.runtime.evaluator`` answers over its pipes: ``initial_parts`` (the weights a run starts from),
``plan_stage`` (what each device can train inside its budget), ``evaluate`` (the global model on the test set),
``similarity`` (the devices' models on probe samples).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.budget.fit import place
from edgefl.models.spec import ModelSpec
from edgefl.plan.job import Candidate, Hyper, Job, Placement, Slots, Stage, Transfer
from edgefl.process.worker import Note, serve
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import EvaluationRow, Manifest
from edgefl.registry import choose
from edgefl.storage.objects import ObjectStore

if TYPE_CHECKING:  # torch waits for the first request: that it is missing has to be told as an answer
    from edgefl.pricing.round_price import Pricer
    from edgefl.training.evaluate import TestSet


class InitialParts(msgspec.Struct, frozen=True):
    """Request: random or pretrained weights of every part, into the store at ``store``."""

    model: ModelSpec
    seed: int
    store: str


class PlanStage(msgspec.Struct, frozen=True):
    """Request: one placement a candidate. ``before``: the stage whose rounds came before."""

    model: ModelSpec
    stage: Stage
    hyper: Hyper
    slots: Slots
    candidates: tuple[Candidate, ...]
    part_bytes: dict[str, int]
    before: Stage | None = None
    transfer: Transfer | None = None
    signature: str = ""


class Evaluate(msgspec.Struct, frozen=True):
    """Request: the model of ``manifest`` on the test set at ``test``.

    ``prototypes``: also with the prototype mask; ``slots``: how it matches, and what the model is judged by;
    ``networks``: as for ``edgefl.training.matching.matching``; ``probes``: some of the test set are not for testing.
    """

    model: ModelSpec
    stage: Stage
    manifest: Manifest
    store: str
    test: str
    prototypes: bool = False
    slots: Slots = Slots()
    networks: dict[str, dict[str, float]] = {}
    probes: bool = False


class Similarity(msgspec.Struct, frozen=True):
    """Request: weights of the devices by how alike their models (device -> parts) see the probes in ``test``."""

    model: ModelSpec
    stage: Stage
    models: dict[str, Manifest]
    store: str
    test: str
    weight: dict[str, dict[str, Any]] = {}  # the recipe's slot weight


class Evaluator:
    """Answers the requests; keeps prices and the test set between them."""

    def __init__(self) -> None:
        self._pricer: Pricer | None = None
        self._tests: dict[str, TestSet] = {}

    def initial_parts(self, body: object, note: Note) -> Manifest:
        """Part -> object, for every part of the model."""
        from edgefl.models.checkpoints import initial_parts

        request = msgspec.convert(body, InitialParts)
        store = ObjectStore(Path(request.store))
        return {part: store.put(encode_part(tensors)) for part, tensors in initial_parts(request.model, request.seed)}

    def plan_stage(self, body: object, note: Note) -> list[Placement]:
        """One placement a candidate, in order."""
        from edgefl.pricing.round_price import Pricer

        request = msgspec.convert(body, PlanStage)
        self._pricer = pricer = self._pricer or Pricer()
        transfer = request.transfer or Transfer()
        job = Job(request.model, request.stage, request.hyper, request.slots, transfer=transfer)
        return [
            place(job, device, request.part_bytes, pricer, before=request.before, signature=request.signature)
            for device in request.candidates
        ]

    def evaluate(self, body: object, note: Note) -> list[EvaluationRow]:
        """Accuracy with everything, and with each modality alone."""
        import numpy as np

        from edgefl.training.evaluate import TestSet, evaluate, probe_rows, tasks_of
        from edgefl.training.matching import matching

        request = msgspec.convert(body, Evaluate)
        parts = _parts(request.store, request.manifest)
        test = self._test(request.test, request.model)
        if request.probes:
            rows = probe_rows(test.data, request.model)
            test = TestSet(test.data.subset(np.delete(np.arange(len(test.data)), rows)))
        matcher, networks = matching(request.model, parts, request.slots, request.networks)
        tasks = tasks_of(request.model, request.slots, test.data)
        return evaluate(
            request.model,
            request.stage,
            parts,
            test,
            prototypes=request.prototypes,
            tasks=tasks,
            matcher=matcher,
            networks=networks,
            statistics=request.slots.statistics,
        )

    def similarity(self, body: object, note: Note) -> dict[str, float]:
        """Weights, sum 1, of the devices whose model has finite outputs."""
        import numpy as np

        from edgefl.training.evaluate import probe_rows, represent

        request = msgspec.convert(body, Similarity)
        test = self._test(request.test, request.model)
        probes = test.data.subset(probe_rows(test.data, request.model))
        outputs = {
            device: represent(request.model, request.stage, _parts(request.store, manifest), probes)
            for device, manifest in request.models.items()
        }
        finite = {device: found for device, found in outputs.items() if np.isfinite(found).all()}
        weights: dict[str, float] = choose("weight", {"weight": request.weight}).method.similarity(finite)
        return weights

    def _test(self, path: str, model: ModelSpec) -> TestSet:
        from edgefl.training.evaluate import TestSet

        if path not in self._tests:
            self._tests[path] = TestSet.load(path, model)
        return self._tests[path]


def _parts(store: str, manifest: Manifest) -> dict[str, Any]:
    objects = ObjectStore(Path(store))
    return {name: decode_part(objects.read(ref.id)) for name, ref in manifest.items()}


def main() -> None:
    """Serve until the coordinator closes the pipe."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the coordinator decides
    evaluator = Evaluator()
    serve(
        {
            "initial_parts": evaluator.initial_parts,
            "plan_stage": evaluator.plan_stage,
            "evaluate": evaluator.evaluate,
            "similarity": evaluator.similarity,
        }
    )


if __name__ == "__main__":
    main()

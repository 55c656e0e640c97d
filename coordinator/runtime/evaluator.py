"""The coordinator's worker process, the only one of its parts with torch.

``python -m coordinator.runtime.evaluator`` answers over its pipes: ``initial_parts`` (the weights a run starts from),
``plan_stage`` (what each device can train inside its budget), ``evaluate`` (the global model on the test set),
``similarity`` (the devices' models on probe samples).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl.aggregation.layer_round import exchangeable_layers
from edgefl.aggregation.mean import stored_layout
from edgefl.aggregation.weights import wanted
from edgefl.models.spec import PROTOTYPES
from edgefl.plan.job import Candidate, Job, Placement, RunPlan
from edgefl.plan.packed_sizes import Layout
from edgefl.plan.periods import period_length
from edgefl.plan.stages import stage_before
from edgefl.process.worker import Handler, Note, serve
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import EvaluationRow, Manifest
from edgefl.registry import choose, offers
from edgefl.storage.objects import ObjectStore

if TYPE_CHECKING:  # torch waits for the first request: that it is missing has to be told as an answer
    from edgefl.data.dataset import Dataset
    from edgefl.training.evaluate import Tensors


#: What the worker is asked: methods of ``Evaluator``.
METHODS = ("initial_parts", "plan_stage", "evaluate", "similarity")


class Request(msgspec.Struct, frozen=True):
    """A request about one run. ``store``: the directory of objects; ``stage``: a stage's number.

    ``manifest``: the model state, or as much of it as is evaluated; ``candidates``: devices to place; ``models``: parts
    by device, to be compared; ``networks``, ``k``: as for ``edgefl.training.matching.matching``.
    """

    plan: RunPlan
    store: str
    stage: int = 1
    manifest: Manifest = {}
    candidates: tuple[Candidate, ...] = ()
    models: dict[str, Manifest] = {}
    networks: dict[str, dict[str, float]] = {}
    k: int | msgspec.UnsetType = msgspec.UNSET


class Evaluator:
    """Answers the requests; keeps the test set between them, and the process the prices."""

    def __init__(self) -> None:
        self._tests: dict[str, Dataset] = {}

    def answer(self, method: str, body: object, note: Note | None = None) -> object:
        """The answer of one of ``METHODS`` to a request."""
        answer: object = getattr(self, method)(msgspec.convert(body, Request))
        return answer

    def initial_parts(self, request: Request) -> Manifest:
        """Random or pretrained weights of every part of the model, put into the store."""
        from edgefl.models.checkpoints import initial_parts

        store, plan = ObjectStore(Path(request.store)), request.plan
        return {part: store.put(encode_part(tensors)) for part, tensors in initial_parts(plan.model, plan.seed)}

    def plan_stage(self, request: Request) -> list[Placement]:
        """Placements of the candidates, in their order."""
        from edgefl.budget.fit import place
        from edgefl.pricing.round_price import process_pricer

        pricer = process_pricer()
        plan, stage = request.plan, request.plan.stages[request.stage - 1]
        job = Job(plan.model, stage, plan.hypers[request.stage - 1], plan.slots, transfer=plan.transfer)
        sizes = {part: ref.size for part, ref in request.manifest.items()}
        layouts = _layouts(request, stage.present)
        layers: dict[str, int] = {}
        if period_length(plan, stage) > 1:
            layers = exchangeable_layers(ObjectStore(Path(request.store)), request.manifest, stage.trained)
        before, signature = stage_before(plan.stages, stage), wanted(plan.server)
        return [
            place(job, one, sizes, pricer, before=before, signature=signature, layers=layers, layouts=layouts)
            for one in request.candidates
        ]

    def evaluate(self, request: Request) -> list[EvaluationRow]:
        """Test metrics with all modalities and with each alone; class prototypes also by their mask.

        Samples that weigh the devices (slot weight) are left out.
        """
        import numpy as np

        from edgefl.training.evaluate import Criteria, evaluate, probe_rows, tasks_of
        from edgefl.training.matching import matching

        plan, parts = request.plan, _parts(request.store, request.manifest)
        test = self._test(plan)
        if choose("weight", plan.server).method.similarity is not None:
            rows = probe_rows(test, plan.model)
            test = test.subset(np.delete(np.arange(len(test)), rows))
        matcher, networks = matching(plan.model, parts, plan.slots, request.networks, request.k)
        return evaluate(
            plan.model,
            plan.stages[request.stage - 1],
            parts,
            test,
            Criteria(
                prototypes=PROTOTYPES in request.manifest and offers(plan.server, "prototypes", "candidates"),
                tasks=tasks_of(plan.model, plan.slots, test),
                matcher=matcher,
                networks=networks,
                statistics=plan.slots.statistics,
                missing=plan.slots.missing,
            ),
        )

    def similarity(self, request: Request) -> dict[str, float]:
        """Aggregation weights, sum 1, by similarity of outputs on probe samples; devices with finite ones only."""
        import numpy as np

        from edgefl.training.evaluate import probe_rows, represent

        plan, data = request.plan, self._test(request.plan)
        probes = data.subset(probe_rows(data, plan.model))
        outputs = {
            device: represent(plan.model, plan.stages[request.stage - 1], _parts(request.store, manifest), probes)
            for device, manifest in request.models.items()
        }
        finite = {device: found for device, found in outputs.items() if np.isfinite(found).all()}
        weight = choose("weight", plan.server)
        weights: dict[str, float] = weight.bind(weight.method.similarity)(finite)
        return weights

    def _test(self, plan: RunPlan) -> Dataset:
        from edgefl.training.evaluate import load_test_set

        if plan.test not in self._tests:
            self._tests[plan.test] = load_test_set(plan.test, plan.model)
        return self._tests[plan.test]


def _parts(store: str, manifest: Manifest) -> dict[str, Tensors]:
    objects = ObjectStore(Path(store))
    return {name: decode_part(objects.read(ref.id)) for name, ref in manifest.items()}


def _layouts(request: Request, parts: Sequence[str]) -> dict[str, Layout]:
    """Tensors of these parts, as they are priced; whole numbers of a model have 64 bits."""
    store, held = ObjectStore(Path(request.store)), request.manifest
    stored = {part: stored_layout(store, held[part]) for part in parts if part in held}
    return {
        part: {name: ("F32" if floating else "I64", shape) for name, (shape, floating) in layout.items()}
        for part, layout in stored.items()
    }


def handlers() -> dict[str, Handler]:
    """Method of ``METHODS`` -> its handler, all of the same evaluator."""
    evaluator = Evaluator()
    return {method: partial(evaluator.answer, method) for method in METHODS}


def main() -> None:
    """Serve until the coordinator closes the pipe."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the coordinator decides
    serve(handlers())


if __name__ == "__main__":
    main()

"""The coordinator's worker: everything that needs torch, in a process of its own.

``python -m coordinator.evaluator`` answers over its pipes: ``initial_parts`` (the weights a run starts from),
``plan_stage`` (what each device can train inside its budget), ``evaluate`` (the global model on the test set).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edgefl.models.spec import ModelSpec
from edgefl.objects import ObjectStore
from edgefl.plan.fit import place
from edgefl.plan.values import Candidate, Hyper, Placement, Slots, Stage
from edgefl.protocol.parts import decode_part, encode_part
from edgefl.records import EvaluationRow, Manifest
from edgefl.worker import Note, serve

if TYPE_CHECKING:  # torch waits for the first request: that it is missing has to be told as an answer
    from edgefl.training.evaluate import TestSet
    from edgefl.training.pricing import Pricer


class InitialParts(msgspec.Struct, frozen=True):
    """Request: random or pretrained weights of every part, into the store at ``store``."""

    model: ModelSpec
    seed: int
    store: str


class PlanStage(msgspec.Struct, frozen=True):
    """Request: one placement a candidate."""

    model: ModelSpec
    stage: Stage
    hyper: Hyper
    slots: Slots
    candidates: tuple[Candidate, ...]
    part_bytes: dict[str, int]


class Evaluate(msgspec.Struct, frozen=True):
    """Request: the model of ``manifest`` on the test set at ``test``; ``prototypes``: also with the prototype mask."""

    model: ModelSpec
    stage: Stage
    manifest: Manifest
    store: str
    test: str
    prototypes: bool = False


class Evaluator:
    """Answers the requests; keeps prices and the test set between them."""

    def __init__(self) -> None:
        self._pricer: Pricer | None = None
        self._tests: dict[str, TestSet] = {}

    def initial_parts(self, body: Any, note: Note) -> Manifest:
        """Part -> object, for every part of the model."""
        from edgefl.models.pretrained import initial_parts

        request = msgspec.convert(body, InitialParts)
        store = ObjectStore(Path(request.store))
        return {part: store.put(encode_part(tensors)) for part, tensors in initial_parts(request.model, request.seed)}

    def plan_stage(self, body: Any, note: Note) -> list[Placement]:
        """One placement a candidate, in order."""
        from edgefl.training.pricing import Pricer

        request = msgspec.convert(body, PlanStage)
        self._pricer = pricer = self._pricer or Pricer()
        return [
            place(request.model, request.stage, request.hyper, request.slots, c, request.part_bytes, pricer)
            for c in request.candidates
        ]

    def evaluate(self, body: Any, note: Note) -> list[EvaluationRow]:
        """Accuracy with everything, and with each modality alone."""
        from edgefl.training.evaluate import TestSet, evaluate

        request = msgspec.convert(body, Evaluate)
        store = ObjectStore(Path(request.store))
        if request.test not in self._tests:
            self._tests[request.test] = TestSet.load(request.test, request.model)
        parts = {name: decode_part(store.read(ref.id)) for name, ref in request.manifest.items()}
        return evaluate(request.model, request.stage, parts, self._tests[request.test], prototypes=request.prototypes)


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
        }
    )


if __name__ == "__main__":
    main()

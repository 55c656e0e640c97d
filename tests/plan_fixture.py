"""What the planner's tests share: a model of two modalities, a device, a made-up price."""

from __future__ import annotations

from edgefl.budget.fit import place, trained_depth
from edgefl.budget.stage_cost import Priced
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import ModelSpec, part_names
from edgefl.plan.job import Candidate, Hyper, Job, Slots, Stage
from edgefl.records import Budget

SHAPE = (16, 3)
SENSOR = encoder_of_size("sensor", "tiny", SHAPE)
MODEL = ModelSpec({"a": SENSOR, "b": SENSOR}, stages=3, classes=2, label_names=("x", "y"))
SUPERVISED = Slots({"cross_entropy": {"weight": 1.0}}, {"zero": {}}, {"none": {}})
ALL = {"": 100, "a": 100, "b": 100}
PART_BYTES = dict.fromkeys(part_names(MODEL), 10)
TINY = dict.fromkeys(part_names(MODEL), 1)  # parts whose coming and going takes less than any step


def candidate(budget: Budget | None = None, **fields) -> Candidate:
    fields = {"device": "d", "samples": ALL, "modalities": {"a": SHAPE, "b": SHAPE}, **fields}
    return Candidate(budget=budget or Budget(), **fields)


def price(job: Job, samples) -> Priced:
    """A made-up price that grows with depth and micro-batch, as the real one does."""
    size = job.hyper.micro_batch or job.hyper.batch_size
    replays = 1.5 if job.hyper.micro_batch else 1.0
    return Priced(100 * trained_depth(job.stage) + 10 * size, 1000.0 * replays * trained_depth(job.stage))


def put(stage: Stage, device: Candidate, batch: int = 8, slots: Slots = SUPERVISED, part_bytes=PART_BYTES):
    return place(Job(MODEL, stage, Hyper(batch_size=batch), slots), device, part_bytes, price)

"""What a round moves is predicted: every recipe's bytes down and up beside what the coordinator counted."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from training_fixture import job, model_spec, with_hyper

from coordinator.core.assignments import expected
from coordinator.core.state import Device, State
from edgefl.budget.stage_cost import prototype_bytes
from edgefl.data.dataset import Dataset
from edgefl.methods.mmic.sketches import sketch
from edgefl.models.parts import part_layout, part_tensors
from edgefl.models.staged import build
from edgefl.plan.job import Candidate, Placement, RunPlan, Stage
from edgefl.plan.packed_sizes import object_bytes
from edgefl.protocol.messages import Hello
from edgefl.protocol.tensors import encode_part
from edgefl.prototypes.mask import DEFAULT_MATCHER
from edgefl.records import Attempt, Cost, Figure
from edgefl.registry import method, signature
from edgefl.training.batches import split
from edgefl.training.forward import Auxiliary, local_tables


def state_of(*rounds: int) -> State:
    return State(RunPlan(stages=tuple(Stage(rounds=count) for count in rounds)))


def test_the_size_of_an_object_follows_from_its_layout():
    model = build(model_spec(stages=2), seed=1)
    for part in model.parts_present:
        assert object_bytes(part_layout(model, part)) == len(encode_part(part_tensors(model, part))), part
    features = np.random.default_rng(1).normal(size=(20, 256)).astype(np.float32)
    assert object_bytes(signature("sketch").layout(())) == len(encode_part(sketch(features)))


ADAPTIVE = {"adaptive": {"local_clusters": 8, "clusters": 4, "neighbours": 2, "min_count": 2}}
PAIRS = {"margin": {"weight": 1.0, "positive": 0.8, "negative": 0.2}}
LABELS_TOO = {"cross_entropy": {"weight": 1.0}, **PAIRS}


@pytest.mark.parametrize(
    ("samples", "absent", "classes", "labels", "holdout"),
    [
        (24, "c", 3, False, 0.0),  # two of the model's three modalities
        (9, "", 3, False, 0.0),  # clusters of two samples at least: four of nine
        (10, "", 3, False, 0.2),  # of the eight that are trained on
        (24, "", 0, True, 0.0),  # labels that the recipe does not read
        (24, "", 3, True, 0.0),
    ],
)
def test_adaptive_prototypes_are_as_large_as_predicted(samples, absent, classes, labels, holdout):
    two = model_spec(stages=2)
    names = two.label_names if classes else ()
    encoders = {**two.encoders, "c": two.encoders["b"]}
    spec = msgspec.structs.replace(two, encoders=encoders, classes=classes, label_names=names)
    stage = method("schedule", "end_to_end").stages(spec, [1, 1], "auto")[-1]
    made = job(spec, stage, objective=LABELS_TOO if classes else PAIRS, prototypes=ADAPTIVE, holdout=holdout)
    made = with_hyper(made, batch_size=4)
    rng = np.random.default_rng(0)
    values = {m: rng.normal(size=(samples, *e.input_shape)).astype(np.float32) for m, e in spec.encoders.items()}
    data = Dataset(
        modalities={m: v for m, v in values.items() if m != absent},
        present={m: np.ones(samples, bool) for m in values if m != absent},
        labels=np.arange(samples) % 3 if labels else None,
        label_names=("x", "y", "z"),
        ids=[str(i) for i in range(samples)],
    )
    model = build(spec, seed=1)
    own, _ = split(made, data, "")
    tables = local_tables(made, model, Auxiliary({}, {}, {}, (), DEFAULT_MATCHER), own, rng)
    device = Candidate(samples=data.samples(), class_counts=data.class_counts())
    assert prototype_bytes(made, device, {})[1] == len(encode_part(tables))


def test_a_device_without_labels_sends_no_class_means():
    made = job(objective=LABELS_TOO, prototypes={"class_mean": {"min_count": 2}})
    whole, without = (Candidate(samples={"": 9, "a": 9, "b": 9}, class_counts=n) for n in ((3, 3, 3), (0, 0, 0)))
    assert prototype_bytes(made, whole, {})[1] > 0
    assert prototype_bytes(made, without, {})[1] == 0


def test_a_device_that_missed_a_stage_receives_what_that_one_changed_too():
    """It was predicted what a device receives that took part in the stage before, and its signature no second time."""
    cost = Cost(joining_down_bytes=100, entering_down_bytes=40, payload_up_bytes=7, whole_up_bytes=7, signature_bytes=5)
    figures = {"payload_down_bytes": Figure(30.0), "payload_up_bytes": Figure(7.0)}
    state = state_of(2, 0, 2, 2)

    def moves(holds: int, stage: int) -> tuple[float | None, float | None]:
        known = msgspec.structs.replace(state, devices={"d": Device(Hello(device="d"), holds=holds)})
        found = expected(known, Attempt("r", stage, 1, 1), Placement("d", cost=cost, predicted=figures), "d")
        return found["payload_down_bytes"].value, found["payload_up_bytes"].value

    assert [moves(3, 3), moves(1, 3), moves(1, 4), moves(0, 4)] == [(30, 7), (40, 7), (100, 7), (100, 12)]


def test_a_device_that_begins_a_stage_in_its_second_round_fills_its_store_then():
    """Not chosen in the first round; FedMVP of three sensors then took 5.3 MFLOP where 4.5 were predicted."""
    placement = Placement("d", predicted={"flops": Figure(4.5e6)}, predicted_first={"flops": Figure(5.3e6)})
    state = state_of(3)
    found = []
    for holds, number in ((0, 1), (0, 2), (1, 2)):
        known = msgspec.structs.replace(state, devices={"d": Device(Hello(device="d"), holds=holds)})
        found.append(expected(known, Attempt("r", 1, number, 1), placement, "d")["flops"].value)
    assert found == [5.3e6, 5.3e6, 4.5e6]

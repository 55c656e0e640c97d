"""Updates of the right names and shapes with values that ruin the model: refused by name; the run goes on and ends."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from coordinator_fixture import Breaking, FakeWorker
from test_coordinator_runner import Scene, one_stage, played, values

from coordinator.outliers import out_of_line
from coordinator.values import Change, Changes
from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.remember import UpdateInfo
from edgefl.objects import ObjectStore
from edgefl.plan.values import RoundPolicy
from edgefl.protocol.parts import decode_part, encode_part
from edgefl.records import EvaluationRow
from edgefl.report.rows import RunReport

POLICY = RoundPolicy(devices=3, join_s=5.0, quorum=0.5, deadline_s=600.0)


def writing(change: Any) -> Breaking:
    """A device whose parts hold ``change`` of what it would have sent."""

    def breaking(manifest, samples, store):
        changed = {}
        for part, ref in manifest.items():
            tensor = np.array(decode_part(store.read(ref.id))["w"])
            changed[part] = store.put(encode_part({"w": change(tensor)}))
        return changed, samples

    return breaking


def one(value: float) -> Breaking:
    def change(tensor: np.ndarray) -> np.ndarray:
        tensor[7] = value
        return tensor

    return writing(change)


def every(value: float) -> Breaking:
    return writing(lambda tensor: np.full_like(tensor, value))


class Diverging(FakeWorker):
    """Its loss is not a number for a state that arithmetic in f32 can not hold."""

    def evaluate(self, body: dict[str, Any]) -> list[EvaluationRow]:
        rows = super().evaluate(body)
        store = ObjectStore(Path(body["store"]))
        state = [decode_part(store.read(ref.id))["w"] for ref in body["manifest"].values()]
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum(float(np.dot(tensor, tensor)) for tensor in state)
        loss = total if math.isfinite(total) else math.nan
        return [*rows, EvaluationRow(available=("acc",), metric="loss", value=loss, samples=10)]


@pytest.mark.parametrize(
    ("breaking", "reason"),
    [(one(3e38), "range"), (every(1e30), "range"), (every(-1e30), "range"), (one(1e8), "change")],
    ids=["one value of 3e38", "all 1e30", "all -1e30", "one value of 1e8"],
)
@pytest.mark.parametrize("honest", [2, 1])
def test_values_that_ruin_the_mean_are_refused_and_the_run_ends(
    tmp_path: Path, breaking: Breaking, reason: str, honest: int
) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        scene.worker = Diverging()
        await scene.device("evil", breaking=breaking)
        for name in ("b", "c")[:honest]:
            await scene.device(name, add=3.0)
        policy = RoundPolicy(devices=1 + honest, join_s=5.0, quorum=0.5, deadline_s=600.0)
        report = await scene.coordinator(one_stage(policy, 3))

    scene = played(tmp_path, script)
    assert report.status == "done"
    mine = [row for row in report.assignments if row.device == "evil"]
    assert [row.status for row in mine] == ["rejected", "rejected", "quarantined"]
    refusals = [row.refusal for row in mine if row.refusal is not None]
    assert [refusal.reason for refusal in refusals] == [reason, reason, "quarantine"]
    assert "part " in refusals[0].detail
    assert {name for r in report.rounds for name in r.participants} == {"b", "c"} - ({"c"} if honest == 1 else set())
    assert np.allclose(values(scene, "task"), 60 + 3 * 3), "only what the others have trained"
    assert all(math.isfinite(row.value) for row in report.evaluations)


def test_alone_a_device_may_change_its_part_by_as_much_as_there_was_and_not_by_1e10(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        device = await scene.device("a", breaking=every(1e10))

        async def mend() -> None:
            await scene.until(lambda: "rejected" in scene.kinds())
            device.breaking = None

        policy = RoundPolicy(devices=1, join_s=5.0, quorum=0.5, deadline_s=600.0)
        mending = asyncio.create_task(mend())
        report = await scene.coordinator(one_stage(policy, 2))
        await mending

    scene = played(tmp_path, script)
    assert report.status == "done"
    assert np.allclose(values(scene, "task"), 60 + 2)


def test_an_evaluation_that_is_no_number_is_on_record_and_ends_nothing(tmp_path: Path) -> None:
    report = RunReport()

    class Lost(FakeWorker):
        def evaluate(self, body: dict[str, Any]) -> list[EvaluationRow]:
            return [*super().evaluate(body), EvaluationRow(available=("acc",), metric="loss", value=math.nan)]

    async def script(scene: Scene) -> None:
        nonlocal report
        scene.worker = Lost()
        await scene.device("a")
        await scene.device("b")
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0), 2))

    scene = played(tmp_path, script)
    assert report.status == "done"
    assert [(row.round, row.metric) for row in report.evaluations] == [(1, "accuracy"), (2, "accuracy")]
    told = [event.data["text"] for event in scene.events if event.kind == "warning"]
    assert len([text for text in told if "loss with acc is not a finite number" in text]) == 2


def of(**norms: float) -> dict[str, Changes]:
    return {name: {"task": Change(norm, 10.0)} for name, norm in norms.items()}


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        # others of d: 1, 2, 3, median 2, so 100 x 2 = 200 may be; others of c with a d of 201: 1, 2, 201, median 2
        (of(a=1, b=2, c=3, d=200), {}),
        (of(a=1, b=2, c=3, d=201), {"d": 200.0}),
        # of two, the smaller is never left out, and up to the part's own length (10) is in line
        (of(a=0.01, b=10), {}),
        (of(a=0.01, b=11), {"b": 10.0}),
        (of(a=0, b=0, c=10), {}),
        # alone: 100 times the part's own length
        (of(a=1000), {}),
        (of(a=1001), {"a": 1000.0}),
        ({}, {}),
    ],
)
def test_what_is_out_of_line_worked_by_hand(changes: dict[str, Changes], left_out: dict[str, float]) -> None:
    assert {name: refusal.allowed for name, refusal in out_of_line(changes, 100.0).items()} == left_out
    assert out_of_line(changes, 0.0) == {}


def test_a_new_part_that_can_not_be_calculated_with_leaves_the_part_as_it_was(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    previous = {part: store.put(encode_part({"w": np.zeros(2, np.float32)})) for part in ("task", "fusion")}
    sent = {"task": np.full(2, 1e19, np.float32), "fusion": np.ones(2, np.float32)}
    update = UpdateInfo("a", {part: store.put(encode_part({"w": value})) for part, value in sent.items()}, {})
    update = msgspec.structs.replace(update, samples={"task": 5, "fusion": 5})
    recipe = {"optimise": {"momentum": {"lr": 10.0, "beta": 0.0}}}
    state, record = aggregate_round([update], store, previous, recipe)
    assert state["task"] == previous["task"]
    assert record["kept"] == {"task": "its new values can not be calculated with"}
    assert [(r["device"], r["part"], r["reason"]) for r in record["refused"]] == [("a", "task", "range")]
    assert decode_part(store.read(state["fusion"].id))["w"].tolist() == [10.0, 10.0]

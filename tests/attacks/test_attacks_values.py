"""Updates of the right names and shapes with values that ruin the model: refused by name; the run goes on and ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from statistics import median_high
from typing import Any

import msgspec
import numpy as np
import pytest
from coordinator_fixture import Breaking, FakeWorker
from test_coordinator_runner import Scene, one_stage, played, values

from coordinator.core import outliers
from coordinator.core.outliers import out_of_line
from coordinator.core.state import Change, Changes, Claim
from coordinator.runtime.evaluator import Request
from coordinator.runtime.validate_update import Own
from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.mean import MisfitError, capped
from edgefl.data.dataset import Dataset
from edgefl.plan.job import RoundPolicy
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes.table import ClassMeans, to_tensors
from edgefl.records import EvaluationRow, Manifest
from edgefl.report import decisions
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore

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
    """Its loss is not a number for a state that arithmetic in f32 cannot hold."""

    def evaluate(self, request: Request) -> list[EvaluationRow]:
        rows = super().evaluate(request)
        store = ObjectStore(Path(request.store))
        state = [decode_part(store.read(ref.id))["w"] for ref in request.manifest.values()]
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
    assert ("part " if reason == "range" or honest == 1 else "times the median") in refusals[0].detail
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
        def evaluate(self, request: Request) -> list[EvaluationRow]:
            return [*super().evaluate(request), EvaluationRow(available=("acc",), metric="loss", value=math.nan)]

    async def script(scene: Scene) -> None:
        nonlocal report
        scene.worker = Lost()
        await scene.device("a")
        await scene.device("b")
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0), 2))

    scene = played(tmp_path, script)
    assert report.status == "done"
    assert [(row.round, row.metric) for row in report.evaluations] == [(1, "accuracy"), (2, "accuracy")]
    assert [(row.round, row.attempt, row.status) for row in report.rounds] == [(1, 2, "done"), (2, 1, "done")]
    told = [event.data["text"] for event in scene.events if event.kind == "warning"]
    assert len([text for text in told if "loss with acc is not a finite number" in text]) == 3
    assert len([text for text in told if "round 1 of stage 1 is taken back" in text]) == 1, "it does not help"


def of(**norms: float) -> dict[str, Changes]:
    return {name: {"task": Change(norm, 10.0)} for name, norm in norms.items()}


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        # others of d: 1, 2, 3, median 2, so 100 x 2 = 200 may be; others of c with a d of 201: 1, 2, 201, median 2
        (of(a=1, b=2, c=3, d=200), {}),
        (of(a=1, b=2, c=3, d=201), {"d": 100.0}),
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


@pytest.mark.parametrize("norms", [(1.0, 5.0), (1.0, 1.0, 4.0), (3.0, 1.0, 2.0, 7.0), (1.0, 2.0, 2.0, 2.0, 90.0)])
def test_the_median_of_the_others_without_a_list_for_each(norms: tuple[float, ...]) -> None:
    """A thousand devices with 60 parts each were compared in 15 s, during which the coordinator heard nobody."""
    for i, norm in enumerate(norms):
        assert outliers._median_without(sorted(norms), norm) == median_high([*norms[:i], *norms[i + 1 :]])
    assert outliers._median_without([1.0], 1.0) == 0


def test_a_new_part_that_can_not_be_calculated_with_leaves_the_part_as_it_was(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    previous = {part: store.put(encode_part({"w": np.zeros(2, np.float32)})) for part in ("task", "fusion")}
    sent = {"task": np.full(2, 1e19, np.float32), "fusion": np.ones(2, np.float32)}
    update = UpdateInfo("a", {part: store.put(encode_part({"w": value})) for part, value in sent.items()}, {})
    update = msgspec.structs.replace(update, samples={"task": 5, "fusion": 5})
    recipe = {"optimise": {"momentum": {"lr": 10.0, "beta": 0.0}}}
    state, record = aggregate_round([update], store, previous, recipe)
    assert state["task"] == previous["task"]
    assert record["kept"] == {"task": "its new values cannot be calculated with"}
    assert [(r["device"], r["part"], r["reason"]) for r in record["refused"]] == [("a", "task", "range")]
    assert decode_part(store.read(state["fusion"].id))["w"].tolist() == [10.0, 10.0]


# How much a device can weigh


def claiming(count: int) -> Breaking:
    return lambda manifest, samples, store: (manifest, dict.fromkeys(samples, count))


def weights(report: RunReport) -> dict[str, float]:
    return report.rounds[-1].record["parts"]["task"]["devices"]


def test_a_device_that_introduces_itself_with_a_trillion_samples_is_told_of_and_can_be_capped(tmp_path: Path) -> None:
    reports: list[RunReport] = []

    async def script(scene: Scene) -> None:
        await scene.device("evil", samples=10**12)
        await scene.device("b", samples=30)
        await scene.device("c", samples=10)
        policy = msgspec.structs.replace(POLICY, largest_share=(1.0, 0.4, 0.5)[len(reports)])
        reports.append(await scene.coordinator(one_stage(policy, 2)))

    told = [[e.data["text"] for e in played(tmp_path / name, script).events if e.kind == "warning"] for name in "123"]
    assert weights(reports[0])["evil"] > 0.999
    assert len(told[0]) == 1, "once a run"
    assert told[0][0].startswith("evil: it has 100 % of the weight of part ")
    assert told[0][0].endswith(" and more than half of 1 more; round.largest_share caps it")
    notes = decisions.refusals(reports[0]).notes
    assert f"Warned of {told[0][0]}." in notes
    # 0.4 of the weight is evil's; b and c share 0.6 as 3 to 1: 0.45 and 0.15, of which b's is capped too
    assert weights(reports[1]) == pytest.approx({"evil": 0.4, "b": 0.4, "c": 0.2})
    assert POLICY.largest_share == 0.5, "unless the run file says more"
    assert weights(reports[2]) == pytest.approx({"evil": 0.5, "b": 0.375, "c": 0.125})
    assert told[1] == []


@pytest.mark.parametrize(
    ("shares", "most", "expected"),
    [
        ({"a": 0.7, "b": 0.2, "c": 0.1}, 1.0, {"a": 0.7, "b": 0.2, "c": 0.1}),
        ({"a": 0.7, "b": 0.2, "c": 0.1}, 0.4, {"a": 0.4, "b": 0.4, "c": 0.2}),
        ({"a": 0.7, "b": 0.2, "c": 0.1}, 0.1, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}),
        ({"a": 1.0}, 0.5, {"a": 1.0}),
        ({}, 0.5, {}),
    ],
)
def test_a_capped_share_goes_to_the_others(shares: dict[str, float], most: float, expected: dict[str, float]) -> None:
    assert capped(shares, most) == pytest.approx(expected)


def test_the_first_hello_of_a_run_says_how_many_samples_count(tmp_path: Path) -> None:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        device = await scene.device("a", samples=10)
        await scene.device("b", samples=30)

        def growing(manifest: Manifest, samples: dict[str, int], store: ObjectStore) -> tuple[Manifest, dict[str, int]]:
            device.samples = 1000
            device.hello()
            return manifest, dict.fromkeys(samples, 1000)

        device.breaking = growing
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0, deadline_s=600.0), 1))

    scene = played(tmp_path, script)
    assert weights(report) == pytest.approx({"a": 0.25, "b": 0.75})
    told = [e.data["text"] for e in scene.events if e.kind == "warning"]
    assert told == ["a: it now says it has 1000 samples; in this run the first 10 count"]


def test_a_device_that_first_said_it_has_fewer_than_no_samples_weighs_nothing(tmp_path: Path) -> None:
    """One such device ended the run: "the weight of device 'a' is -9.0"."""
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        device = await scene.device("a", samples=-9)
        await scene.device("b", samples=10)

        def growing(manifest: Manifest, samples: dict[str, int], store: ObjectStore) -> tuple[Manifest, dict[str, int]]:
            device.samples = 1000
            device.hello()
            return manifest, dict.fromkeys(samples, 1000)

        device.breaking = growing
        report = await scene.coordinator(one_stage(RoundPolicy(devices=2, join_s=5.0, deadline_s=600.0), 1))

    scene = played(tmp_path, script)
    assert weights(report).get("a", 0.0) == 0.0
    assert np.isfinite(values(scene, "task")).all()


def tables(count: float, mean: float, classes: int = 2) -> bytes:
    table = ClassMeans(np.full((classes, 3), mean, np.float32), np.full(classes, count, np.float32))
    return encode_part(to_tensors({"acc": table}))


@pytest.mark.parametrize(
    ("count", "mean", "reason"), [(1e6, 1.0, "samples"), (6, 1.0, "samples"), (1, 1.0, "few"), (5, 1e30, "range")]
)
def test_prototypes_of_more_samples_than_a_device_has_or_of_one_are_refused(
    tmp_path: Path, count: float, mean: float, reason: str
) -> None:
    report = RunReport()
    plan = one_stage(RoundPolicy(devices=2, join_s=5.0, deadline_s=600.0), 3)
    plan = msgspec.structs.replace(plan, server={"prototypes": {"class_mean": {"min_count": 2.0}}})

    async def script(scene: Scene) -> None:
        nonlocal report
        await scene.device("evil", class_counts=(5, 5), beside={"prototypes": tables(count, mean)})
        await scene.device("b", class_counts=(5, 5), beside={"prototypes": tables(5, 1.0)})
        report = await scene.coordinator(plan)

    scene = played(tmp_path, script)
    mine = [row for row in report.assignments if row.device == "evil"]
    assert [row.status for row in mine] == ["rejected", "rejected", "quarantined"]
    assert mine[0].refusal is not None
    assert mine[0].refusal.reason == reason
    assert "prototypes" in mine[0].refusal.detail
    state = scene.worker.evaluated[-1]["prototypes"]
    merged = decode_part(ObjectStore(tmp_path / "run" / "objects").read(state.id))
    assert merged["acc.count"].tolist() == [5.0, 5.0]
    assert merged["acc"].max() == 1.0


@pytest.mark.parametrize(
    ("counts", "good"), [((5, 9, 0), True), ((9, 5, 0), True), ((9, 9, 0), False), ((5, 5, 4), False)]
)
def test_a_device_numbers_classes_in_its_own_order(counts: tuple[float, ...], good: bool) -> None:
    rows, labels = np.zeros((14, 3), np.float32), np.repeat([0, 1], (9, 5))
    data = Dataset({"acc": rows}, {"acc": np.ones(14, bool)}, labels, ("a", "b"), [str(i) for i in range(14)])
    own = Own(Claim(data.samples(), data.class_counts()))
    assert data.relabelled(("b", "a", "c")).class_counts() == (5, 9, 0), "as the trainer numbers them for the model"
    table = ClassMeans(np.ones((3, 3), np.float32), np.array(counts, np.float32))
    with contextlib.nullcontext() if good else pytest.raises(MisfitError, match="samples claimed"):
        own.check({"acc": table})

"""The role upload: what the core gives a method, what it takes back, what it costs, and what the server accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share, state_of
from training_fixture import dataset, job, parts_of

from edgefl import registry
from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.budget.stage_cost import StageTraffic, moved
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ModelError
from edgefl.models.staged import build
from edgefl.plan.job import Candidate, Job
from edgefl.protocol.tensors import decode_part
from edgefl.registry import Option, Trained
from edgefl.report.price_tables import price_grids
from edgefl.roles import Upload
from edgefl.training.evaluate import Criteria, judge
from edgefl.training.local_evaluation import losses_by_modalities
from edgefl.training.local_round import LocalState, RoundResult, train_round

Given = list[Trained]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers an upload "mine"."""
    monkeypatch.setitem(registry._methods, "upload", dict(registry.methods("upload")))

    def done(**fields: Any) -> None:
        registry.register(Upload("mine", "a test's", {"share": Option(0.5, "its")}, **fields))

    return done


MINE = {"mine": {}}


def every(part_bytes: Mapping[str, int]) -> int:
    """The bytes of an update that may leave out parts, and has them all."""
    return sum(part_bytes.values())


def ran(made: Job, kept: dict[str, Any] | None = None, holdout: Dataset | None = None) -> RoundResult:
    return train_round(made, dataset(12), parts_of(made), LocalState(holdout, kept or {}), salt="x")


def test_a_method_is_given_what_was_trained_and_received_and_what_it_kept(install: Callable[..., None]) -> None:
    seen: Given = []

    def send(trained: Trained, generator: np.random.Generator, *, share: float) -> Any:
        seen.append(trained)
        noted = {"n": np.array([share + len(trained.kept)])}
        return {part: {n: t + 1 for n, t in each.items()} for part, each in trained.parts.items()}, noted

    install(send=send)
    plain, made = ran(job()), ran(job(upload=MINE))
    assert seen[0].parts.keys() == plain.parts.keys() == made.parts.keys()
    for part, tensors in plain.parts.items():
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(seen[0].parts[part][name], tensor)
            np.testing.assert_array_equal(made.parts[part][name], tensor + 1)
    assert seen[0].received["task"].keys() == plain.parts["task"].keys()
    assert (seen[0].losses, seen[0].kept) == ({}, {})
    assert made.kept == {"upload/mine": {"n": np.array([0.5])}}
    again = ran(job(upload=MINE), made.kept)
    assert seen[1].kept == made.kept["upload/mine"]
    assert again.kept["upload/mine"]["n"] == 1.5
    assert made.samples == plain.samples


@pytest.mark.parametrize(
    ("omits", "changed", "why"),
    [
        (False, lambda parts: {**parts, "a/stage9": {}}, "sends parts that it was not given: a/stage9"),
        (False, lambda parts: {"task": parts["task"]}, "leaves out a/.*; all must be sent"),
        (True, lambda parts: {}, "leaves out a/.*; one part at least must be sent"),
        (True, lambda parts: {"task": {}}, "changes the tensors of part task: "),
        (
            True,
            lambda parts: {"task": {n: t[:1] for n, t in parts["task"].items()}},
            "changes the tensors of part task",
        ),
        (
            True,
            lambda parts: {"task": {n: t.astype("f8") for n, t in parts["task"].items()}},
            "changes the tensors of part task",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_at_the_device(
    install: Callable[..., None], omits: bool, changed: Callable[[Any], Any], why: str
) -> None:
    install(send=lambda trained, generator: (changed(trained.parts), {}), most=every if omits else None)
    with pytest.raises(ModelError, match=f"upload: mine {why}") as refused:
        ran(job(upload=MINE))
    assert refused.value.remedy == "Mend the method's send, or set slots.upload: whole."


def test_more_bytes_than_the_plan_counts_are_refused_at_the_device(install: Callable[..., None]) -> None:
    install(send=lambda trained, generator: (trained.parts, {}), most=lambda part_bytes: sum(part_bytes.values()) - 1)
    with pytest.raises(ModelError, match=r"upload: mine sends (\d+) bytes, and says that it sends \d+ at most"):
        ran(job(upload=MINE))


def test_losses_are_those_of_the_complete_samples_given_some_modalities() -> None:
    made = job()
    data = dataset(12, {"b": [6, 7, 8, 9, 10, 11]})
    model = build(made.model, made.stage.present, seed=1)
    found = losses_by_modalities(made, model, data, {})
    assert found.keys() == {frozenset("a"), frozenset("b"), frozenset("ab")}
    own = data.subset(range(6))
    whole = judge(model, own, made.stage.depth, {}, ["a", "b"], Criteria(frozenset({"classification"})))
    assert found[frozenset("ab")] == whole["loss"]
    assert len(set(found.values())) == 3
    assert losses_by_modalities(made, model, dataset(12, {"b": list(range(12))}), {}).keys() == {frozenset("a")}
    assert losses_by_modalities(made, model, data.subset([]), {}) == {}


def test_the_bytes_up_are_the_most_that_an_upload_sends(install: Callable[..., None]) -> None:
    install(
        send=lambda trained, generator: (trained.parts, {}),
        most=lambda part_bytes, *, share: round(share * sum(part_bytes.values())),
    )
    made = job()
    traffic = StageTraffic(made.stage, dict.fromkeys(made.stage.present, 100))
    device = Candidate(samples={"": 9, "a": 9, "b": 9})
    whole, half = (moved(one, device, traffic) for one in (made, job(upload=MINE)))
    assert whole.payload_up_bytes == 100 * len(made.stage.trained)
    assert (half.payload_up_bytes, half.whole_up_bytes) == (whole.payload_up_bytes // 2, whole.whole_up_bytes // 2)
    assert half.payload_down_bytes == whole.payload_down_bytes


def test_a_plan_says_that_its_bytes_up_are_the_most(install: Callable[..., None], ram_path: Path) -> None:
    install(send=lambda trained, generator: (trained.parts, {}), most=every)
    plan_of(ram_path, "end_to_end", "ab", 2, [])
    shown = {}
    for upload in ("whole", "mine"):
        price = price_of(str(ram_path / "run.yaml"), [f"slots.upload={upload}"], PlanOptions(("cpu",)))
        shown[upload] = any("Up is the most: with upload: mine" in note for g in price_grids(price) for note in g.notes)
    assert shown == {"whole": False, "mine": True}


def test_a_fleet_combines_a_part_over_those_who_sent_it(install: Callable[..., None], ram_path: Path) -> None:
    """Both leave b out in the first round and a in the second; evaluations by modalities are in the price."""

    def send(trained: Trained, generator: np.random.Generator) -> Any:
        assert trained.losses.keys() == {frozenset("a"), frozenset("b"), frozenset("ab")}
        left = "a/" if "sent" in trained.kept else "b/"
        return {p: t for p, t in trained.parts.items() if not p.startswith(left)}, {"sent": np.array([1])}

    install(send=send, most=every, returns=True)
    plan = plan_of(ram_path, "end_to_end", "ab", 2, ["slots.upload=mine", "training.rounds=[2, 0]"])
    report = run_fleet(ram_path, plan, {f"d{i}": share(24, {"a": 1.0, "b": 1.0}, seed=i) for i in range(2)})
    assert report.status == "done"
    assert [("a/embed" in row.record["parts"], "b/embed" in row.record["parts"]) for row in report.rounds] == [
        (True, False),
        (False, True),
    ]
    assert report.rounds[0].record["parts"]["a/embed"]["devices"] == {"d0": 0.5, "d1": 0.5}
    assert not any(row.record["refused"] for row in report.rounds)
    for row in report.assignments:
        assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=1e-3)
    store, state = state_of(ram_path)
    assert decode_part(store.read(state["a/embed"].id))


@pytest.mark.parametrize(
    ("recipe", "changes", "why"),
    [
        (
            "mmic",
            ["training.holdout=0.2"],
            "mine changes what devices send, and repair: poverty reads what devices trained",
        ),
        ("mmic-layer", ["training.holdout=0.2"], "mine changes what devices send, and repair: poverty"),
        ("local", [], "mine chooses what devices send, and with weight: own they send nothing"),
    ],
)
def test_slots_that_contradict_an_upload_are_refused(
    install: Callable[..., None], ram_path: Path, recipe: str, changes: list[str], why: str
) -> None:
    install(send=lambda trained, generator: (trained.parts, {}))
    with pytest.raises(ConfigError, match=why):
        plan_of(ram_path, recipe, "ab", 2, ["slots.upload=mine", *changes])


def test_an_upload_that_goes_by_hold_outs_has_some(install: Callable[..., None], ram_path: Path) -> None:
    install(send=lambda trained, generator: (trained.parts, {}), returns=True)
    plan = plan_of(ram_path, "end_to_end", "ab", 2, ["slots.upload=mine", "training={rounds: [1, 1], batch_size: 6}"])
    assert plan.hypers[0].holdout == 0.2
    with pytest.raises(ConfigError, match="is 0, and upload: mine goes by what devices measure"):
        plan_of(ram_path, "end_to_end", "ab", 2, ["slots.upload=mine", "training.holdout=0"])


def test_a_selection_of_parts_is_not_private(install: Callable[..., None], ram_path: Path) -> None:
    install(send=lambda trained, generator: (trained.parts, {}), most=every)
    with pytest.raises(ConfigError, match="which parts a device sends depends on its data"):
        plan_of(ram_path, "dp-fedavg", "ab", 2, ["slots.upload=mine", "training.holdout=0"])

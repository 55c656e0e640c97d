"""Batch norm's statistics where the server moves the weights: what is evaluated has those of its own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from memory_fleet import SHAPES, plan_of, run_fleet, share, state_of
from test_pricing_overhead import MODELS, whole
from training_fixture import CROSS_ENTROPY, dataset, job, model_spec, parts_of

from coordinator.core.moves import Evaluate
from coordinator.runtime.evaluator import Evaluator
from coordinator.runtime.model_tasks import ModelTasks
from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.api.export_run import export_run
from edgefl.data.dataset import Dataset
from edgefl.errors import ExportError
from edgefl.export.drafts import TrainedState
from edgefl.models.check import encoder_of_size
from edgefl.models.parts import load_part, part_tensors
from edgefl.models.spec import HeadSpec, JointSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.compile import untaken
from edgefl.plan.job import Job, RunPlan
from edgefl.plan.training_samples import MOST
from edgefl.pricing.round_price import Pricer
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Attempt, Manifest
from edgefl.registry import method
from edgefl.report.quality import evaluation
from edgefl.storage.objects import ObjectStore
from edgefl.training.batches import split
from edgefl.training.embeddings import chosen_rows, heads_with_statistics, retake
from edgefl.training.evaluate import Criteria, evaluate, load_test_set
from edgefl.training.flop_cache import FlopCounts
from edgefl.training.local_round import LocalState, train_round

#: What moves weights off the mean of the models whose statistics are taken, by overrides of a FedAvg run.
MOVING = {
    "fedadagrad": ["slots.optimise={fedadagrad: {lr: 0.05}}"],
    "fedadam": ["slots.optimise={fedadam: {lr: 0.05}}"],
    "fedyogi": ["slots.optimise={fedyogi: {lr: 0.1}}"],
    "momentum": ["slots.optimise={momentum: {lr: 1.0, beta: 0.9}}"],
    "fedadagrad_mpo": ["slots.optimise={fedadagrad_mpo: {lr: 0.05}}"],
    "poverty": ["slots.repair={poverty: {}}"],
    "stale": ["round.late=keep", "round.alpha=0.0"],
}
BATCH = [
    "model.head.norm=batch",
    "training.holdout=0.2",
    "training.batch_size=12",
    "training.lr.encoder=0.01",
    "training.lr.head=0.01",
]
ROUNDS = 4


class Here:
    """The coordinator's worker, in this process."""

    async def call(self, method: str, body: Any) -> Any:
        return msgspec.to_builtins(Evaluator().answer(method, msgspec.to_builtins(body)))

    async def stop(self) -> None: ...


def tasks_of(plan: RunPlan, store: ObjectStore) -> ModelTasks:
    return ModelTasks(plan, store, Here(), lambda event: None, lambda: 0.0)


class Run:
    """Two devices and their server, by the product's own functions and without messages."""

    def __init__(self, directory: Path, moved: str, shares: Mapping[str, Dataset]) -> None:
        self.plan: RunPlan = plan_of(directory, "end_to_end", "ab", len(shares), [*BATCH, *MOVING[moved]])
        self.shares = shares
        self.store = ObjectStore(directory / "objects")
        self.evaluator = tasks_of(self.plan, self.store)
        self.states: list[Manifest] = [asyncio.run(self.evaluator.initial_parts())]
        self.kept: dict[str, Any] = {}
        self.counts = FlopCounts()

    @property
    def job(self) -> Job:
        return Job(self.plan.model, self.plan.stages[-1], self.plan.hypers[-1], self.plan.slots)

    def parts(self, state: Manifest) -> dict[str, dict[str, np.ndarray]]:
        return {part: decode_part(self.store.read(state[part].id)) for part in self.plan.stages[-1].present}

    def update(self, device: str, late: int) -> UpdateInfo:
        base = self.states[-1 - late]
        data = self.shares[device]
        kept = self.kept.get(device)
        local = LocalState(kept=kept.kept if kept else {}, counts=self.counts)
        made = train_round(self.job, data, self.parts(base), local, salt=str(len(self.states)))
        self.kept[device] = made
        manifest = {part: self.store.put(encode_part(tensors)) for part, tensors in made.parts.items()}
        info = UpdateInfo(device, manifest, made.samples, made.metrics, *made.observed[:2])
        return msgspec.structs.replace(info, staleness=late, base=base, factor=1.0) if late else info

    def round(self, late: int = 0) -> None:
        updates = [self.update(device, late) for device in self.shares]
        self.states.append(aggregate_round(updates, self.store, self.states[-1], self.plan.server)[0])

    def loss(self, state: Manifest) -> float:
        """As the coordinator evaluates the global model."""
        self.evaluator.manifest = state
        evaluated = asyncio.run(self.evaluator.evaluated(Evaluate(Attempt("", 1, 1))))
        return next(row.value for row in evaluated.rows if row.metric == "loss")

    def recalibrated(self) -> Manifest:
        """The newest weights with statistics of the training samples: a cumulative average over each device's."""
        state, stage = self.states[-1], self.plan.stages[-1]
        model = build(self.plan.model, stage.present).eval()
        for part, tensors in self.parts(state).items():
            load_part(model, part, tensors)
        for layer in model.modules():
            if isinstance(layer, torch.nn.BatchNorm1d):
                layer.reset_running_stats()
                layer.momentum = None
                layer.train()
        with torch.no_grad():
            for data in self.shares.values():
                for m in SHAPES.keys() & data.modalities.keys():
                    x = torch.from_numpy(np.asarray(data.modalities[m])[data.has(m)])
                    model.project(m, model.encode(m, x, stage.depth))
        return {**state, **{part: self.store.put(encode_part(part_tensors(model, part))) for part in stage.present}}


def noisy(rows: int, seed: int, *, lacking: int = 0) -> Dataset:
    """Samples whose class hardly shows, so that the loss does not come near zero; ``lacking``: how many have no b."""
    data = share(rows, {"a": 1.0, "b": 1.0}, seed)
    draw = np.random.default_rng(seed)
    values = {
        m: (0.3 * np.asarray(x) + draw.normal(size=x.shape)).astype(np.float32) for m, x in data.modalities.items()
    }
    present = {"a": np.ones(rows, bool), "b": np.arange(rows) >= lacking}
    values["b"][:lacking] = 0
    return Dataset(values, present, data.labels, data.label_names, data.ids)


def devices(moved: str) -> dict[str, Dataset]:
    """Two with the same samples; for a repair, one of them without half of one modality."""
    return {"p": noisy(240, 1), "q": noisy(240, 1, lacking=120 if moved == "poverty" else 0)}


@pytest.mark.parametrize(
    "moved", [name if name in {"fedadam", "poverty"} else pytest.param(name, marks=pytest.mark.slow) for name in MOVING]
)
def test_the_global_model_is_evaluated_as_its_own_recalibrated_copy(moved: str, ram_path: Path):
    run = Run(ram_path, moved, devices(moved))
    noisy(600, 99).save_npz(ram_path / "test.npz")
    for number in range(ROUNDS):
        run.round(late=min(number, 2) if moved == "stale" else 0)
    evaluated = run.loss(run.states[-1])
    run.evaluator = tasks_of(as_stored(run.plan), run.store)
    recalibrated = run.loss(run.recalibrated())
    assert evaluated == pytest.approx(recalibrated, rel=0.1)
    if moved not in {"fedyogi", "poverty"}:  # these move too little in so few rounds
        stored = run.loss(run.states[-1])
        assert stored - recalibrated > 3 * abs(evaluated - recalibrated)


def as_stored(plan: RunPlan) -> RunPlan:
    return msgspec.structs.replace(plan, slots=msgspec.structs.replace(plan.slots, statistics=False))


def taking(made: Job) -> Job:
    return msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, statistics=True))


def shifted(parts: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Parts with statistics that belong to other weights."""
    return {
        part: {name: value + 5 if "running" in name else value for name, value in tensors.items()}
        for part, tensors in parts.items()
    }


def test_statistics_by_hand():
    """Inputs 1, 2, 3, 6 through the weight 2: mean 6, variance (16 + 4 + 0 + 36) / 3, and no dropout."""
    head = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Dropout(0.9), torch.nn.BatchNorm1d(1))
    with torch.no_grad():
        head[0].weight.fill_(2.0)
    retake(head.eval(), torch.tensor([[1.0], [2.0], [3.0], [6.0]]))
    assert head[2].running_mean.tolist() == pytest.approx([6.0])
    assert head[2].running_var.tolist() == pytest.approx([56 / 3])
    assert (head[2].momentum, head[2].training) == (0.1, False)


def test_at_most_512_samples_of_a_modality_evenly_spaced():
    data = dataset(1100, {"b": list(range(0, 1100, 2))})
    assert len(chosen_rows(data, "b", np.arange(1100))) == MOST == 512
    assert chosen_rows(data, "a", np.arange(1024)).tolist() == list(range(0, 1024, 2))
    assert chosen_rows(data, "b", np.array([2, 3, 4, 7])).tolist() == [3, 7]


def test_a_device_judges_what_it_received_with_statistics_of_its_own_samples():
    made, data = taking(job(holdout=0.25)), dataset(120)
    holdout, own = data.subset(range(30)), data.subset(range(30, 120))
    parts = parts_of(made)
    found = train_round(made, own, shifted(parts), LocalState(holdout)).metrics
    fresh = heads_with_statistics(made.model, made.stage, parts, own)
    expected = evaluate(made.model, made.stage, parts | fresh, holdout, Criteria())
    loss = next(row.value for row in expected if row.metric == "loss")
    assert found["received_loss"] == pytest.approx(loss, rel=1e-5)
    plain = job(holdout=0.25)
    assert train_round(plain, own, shifted(parts), LocalState(holdout)).metrics["received_loss"] > 1.1 * loss


def test_training_goes_on_from_the_statistics_taken_and_is_otherwise_the_same():
    made, data = job(), dataset(24)
    parts = parts_of(made)
    one = train_round(taking(made), data, shifted(parts))
    two = train_round(made, data, parts | heads_with_statistics(made.model, made.stage, parts, data))
    for part, tensors in one.parts.items():
        for name, value in tensors.items():
            np.testing.assert_allclose(value, two.parts[part][name], atol=1e-6, err_msg=f"{part} {name}")


def test_where_the_weights_are_the_mean_nothing_is_taken_and_a_round_keeps_every_bit(monkeypatch):
    made, data = job(), dataset(24)
    before = train_round(made, data, parts_of(made))
    monkeypatch.setattr("edgefl.training.local_round.take_local_statistics", lambda *_: None)
    after = train_round(made, data, parts_of(made))
    assert (before.flops, before.metrics) == (after.flops, after.metrics)
    for part, tensors in before.parts.items():
        for name, value in tensors.items():
            np.testing.assert_array_equal(value, after.parts[part][name])


def test_a_modality_with_one_sample_keeps_the_statistics_it_came_with():
    made, data = taking(job()), dataset(24, {"b": list(range(1, 24))})
    parts = shifted(parts_of(made))
    result = heads_with_statistics(made.model, made.stage, parts, data)
    assert set(result) == {"head/a"}
    assert train_round(made, data, parts).metrics["steps"] == 4


def test_a_personal_model_has_statistics_of_its_own_weights():
    repair = {"poverty": {"form": "exact"}}
    made, data = taking(job(holdout=0.25, repair=repair)), dataset(60, {"b": list(range(20))})
    holdout, own = data.subset(range(0, 60, 4)), data.subset([i for i in range(60) if i % 4])
    parts = parts_of(made)
    first = train_round(made, own, parts, LocalState(holdout))
    kept = {**first.kept}
    again = train_round(made, own, parts, LocalState(holdout, shifted(kept)))
    fresh = heads_with_statistics(made.model, made.stage, parts | kept, own)
    only = msgspec.structs.replace(made, slots=msgspec.structs.replace(made.slots, statistics=False))
    expected = train_round(only, own, parts, LocalState(holdout, {**kept, **fresh}))
    assert again.metrics["personal_loss"] == pytest.approx(expected.metrics["personal_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder_sharing", "multiway"),
        ("fusion", "joint"),
        ("fusion", "mean"),
        ("matching", "prior"),
        ("reconstruction", True),
    ],
)
def test_only_heads_hold_running_statistics(field: str, value: Any):
    """What ``edgefl.training.embeddings`` relies on."""
    encoders = {"s": ("sensor", (16, 3)), "v": ("vision", (16, 16, 3)), "t": ("text", (8,)), "a": ("audio", (32, 16))}
    width = {"width": 64, "heads": 2, "depth": 2}
    spec = ModelSpec(
        {m: encoder_of_size(kind, "tiny", shape, **width) for m, (kind, shape) in encoders.items()},
        **{"stages": 2, "head": HeadSpec(8, 4), "classes": 3, "joint": JointSpec(8, 2, 1), field: value},
    )
    model = build(spec, device="meta")
    holding = {part for part in model.parts_present if any("running" in n for n, _ in model.part(part).named_buffers())}
    assert holding == {f"head/{m}" for m in encoders}


def priced(made: Job, data: Dataset) -> tuple[float, float]:
    """(FLOPs predicted, FLOPs counted) of a second round."""
    own, holdout = split(made, data, "")
    first = train_round(made, own, parts_of(made), LocalState(holdout))
    second = train_round(made, own, parts_of(made), LocalState(holdout, first.kept))
    found = Pricer()(made, data.samples())
    return found.flops + sum(found.cache_fill_flops.values()), second.flops


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"holdout": 0.25}) for name in ("concat", "mean", "multiway")),
        pytest.param("joint", {"holdout": 0.25}, marks=pytest.mark.slow),
        ("concat", {"micro_batch": 2}),
        pytest.param("multiway", {"micro_batch": 2}, marks=pytest.mark.slow),
    ],
)
def test_taking_them_is_priced(name: str, changes: dict[str, Any]):
    made = taking(whole(MODELS[name], **changes))
    predicted, counted = priced(made, dataset(24))
    assert predicted == counted
    without, _ = priced(whole(MODELS[name], **changes), dataset(24))
    assert counted > without


def test_taking_them_is_priced_of_stored_prefixes_personal_models_and_many_samples():
    heads = method("schedule", "heads").stages(model_spec(), [1, 1, 1], "auto")[-1]
    for made, rows in (
        (job(stage=heads, cache="f32"), 24),
        (job(repair={"poverty": {}}, holdout=0.25), 24),
        (job(batch_size=100), 1300),
    ):
        predicted, counted = priced(taking(made), dataset(rows))
        assert predicted == counted


def test_a_teacher_has_statistics_of_the_device_s_samples():
    terms = {**CROSS_ENTROPY, "model_transfer": {"weight": 1.0, "temperature": 1.0}}
    made, data = taking(job(objective=terms, exchange="mappings")), dataset(24)
    parts = parts_of(made)
    shown = [train_round(made, data, given).metrics["loss"] for given in (parts, shifted(parts))]
    assert shown[0] == pytest.approx(shown[1], rel=1e-5)
    predicted, counted = priced(made, data)
    assert predicted == counted


def test_a_test_set_without_inputs_to_take_them_on_is_refused_with_the_way_out(tmp_path: Path):
    plan = plan_of(tmp_path, "fedadam", "ab", 2, ["model.head.norm=batch"])
    assert plan.slots.statistics
    assert untaken(plan, {"": 30, "a": 30, "b": 2}) is None
    problem = untaken(plan, {"": 30, "a": 30, "b": 1})
    assert problem is not None
    assert str(problem) == (
        "model.head.norm: is batch, and optimise: fedadam moves the weights away from their statistics, which are then "
        "taken on data.test; it has 1 samples of 'b', 2 are needed: add them, or set layer"
    )
    assert untaken(plan_of(tmp_path, "fedadam", "ab", 2, []), {}) is None


def test_which_runs_take_them(tmp_path: Path):
    def wanted(recipe: str, *overrides: str) -> bool:
        return plan_of(tmp_path, recipe, "ab", 2, list(overrides)).slots.statistics

    assert not wanted("end_to_end")
    assert not wanted("fedmvp", "model.fusion_width=8")
    assert not wanted("fedmvp", "model.fusion_width=8", "slots.optimise=fedadam", "model.head.norm=batch")  # has none
    assert not wanted("mmic")  # layer norm
    assert wanted("mmic", "model.head.norm=batch")
    assert wanted("apromfl", "model.head.norm=batch")
    assert wanted("end_to_end", "rounds=async")
    assert wanted("end_to_end", "round.late=keep")
    assert not wanted("end_to_end", "round.late=keep", "model.head.norm=layer")


def test_a_run_takes_them_and_exports_bundles_with_them(ram_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = ["model.head.norm=batch", "slots.cluster={lsh: {clusters: 1}}", "slots.select=all"]
    plan = plan_of(ram_path, "mmic", "ab", 2, given)
    report = run_fleet(ram_path, plan, {"p": noisy(60, 1), "q": noisy(60, 2)})
    assert report.status == "done"
    assert "optimise: fedadagrad_mpo moves the weights; batch norm's statistics are" in " ".join(
        evaluation(report).notes
    )
    for row in report.assignments:
        if row.round == 2:  # the first one has no personal model yet
            assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=0.01)
    store, state = state_of(ram_path)
    before = {part: decode_part(store.read(state[part].id)) for part in ("head/a", "head/b")}
    written: list[TrainedState] = []
    monkeypatch.setattr("edgefl.export.bundle.export_bundles", lambda one, *_args, **_more: written.append(one) or [])
    export_run(store.root.parent)
    test = load_test_set(plan.test, plan.model)
    for part, stored in before.items():
        m = part.removeprefix("head/")
        model = build(plan.model, [f"{m}/{x}" for x in ("embed", "stage1", "stage2", "norm")]).eval()
        for name in model.parts_present:
            load_part(model, name, decode_part(store.read(state[name].id)))
        with torch.no_grad():
            h = model.encode(m, torch.from_numpy(np.asarray(test.modalities[m])), 2).numpy()
        first = h @ stored["0.weight"].T
        np.testing.assert_allclose(written[0].parts[part]["2.running_mean"], first.mean(0), atol=1e-5)
        np.testing.assert_allclose(written[0].parts[part]["2.running_var"], first.var(0, ddof=1), rtol=1e-4)
        np.testing.assert_array_equal(written[0].parts[part]["0.weight"], stored["0.weight"])
        assert np.abs(stored["2.running_mean"] - first.mean(0)).max() > 0.01
    assert "task" in written[0].refs
    assert "head/a" not in written[0].refs  # that object has other statistics
    Path(plan.test).unlink()
    with pytest.raises(ExportError, match="statistics are taken on the run's test set") as raised:
        export_run(store.root.parent)
    assert "model.head.norm: layer" in raised.value.remedy

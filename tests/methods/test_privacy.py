"""Differential privacy: sensitivity, noise and account of a private round, the end by its budget, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share

import edgefl
from coordinator.core.machine import round_after
from coordinator.core.state import State
from coordinator.core.step_back import undo_of
from coordinator.ledger.ledger import Ledger
from edgefl.aggregation import history
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.noise import gaussians, with_noise
from edgefl.errors import ConfigError
from edgefl.methods.privacy.gaussian import account, delta_of, epsilon_of
from edgefl.plan.compile import warnings_of
from edgefl.plan.privacy import spending
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest
from edgefl.registry import register
from edgefl.report.rounds import rounds
from edgefl.roles import Combine
from edgefl.storage.objects import ObjectStore

ORACLE = json.loads((Path(__file__).parents[1] / "oracles/privacy.json").read_text())["cases"]
#: Noise far below the change of a device, and none of it visible in f32.
QUIET = {"clip": 1.0, "noise": 0.01, "epsilon": 1e9}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def no_noise(size: int) -> bytes:
    """Bits of which the first of each pair gives the radius 0."""
    return b"\xff" * (size // 2) + bytes(size // 2)


def state_of(store: ObjectStore, **parts: Mapping[str, Any]) -> Manifest:
    return {
        name: store.put(encode_part({tensor: np.asarray(value) for tensor, value in tensors.items()}))
        for name, tensors in parts.items()
    }


def part(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32)}


def sent(store: ObjectStore, device: str, samples: int = 10, **parts: Mapping[str, Any]) -> UpdateInfo:
    return UpdateInfo(device, state_of(store, **parts), dict.fromkeys(parts, samples))


def combined(
    store: ObjectStore, updates: list[UpdateInfo], previous: Manifest, terms: RoundTerms, **options: float
) -> tuple[dict[str, np.ndarray], Manifest, dict[str, Any]]:
    recipe = {"combine": {"gaussian_noise": {**QUIET, **options}}}
    state, record = aggregate_round(updates, store, previous, recipe, terms)
    return {name: decode_part(store.read(state[name].id))["w"] for name in previous if "/" not in name}, state, record


@pytest.mark.parametrize("case", ORACLE, ids=lambda case: f"{case['rounds']} rounds, noise {case['noise']}")
def test_the_account_is_that_of_google_and_of_opacus(case: dict[str, Any]) -> None:
    """dp-accounting 0.6.0's privacy loss distribution and Opacus 1.6.0's PRV accountant, of as many rounds."""
    spent = 0.0
    for _ in range(case["rounds"]):
        told = account(spent, 1, noise=case["noise"], delta=case["delta"], epsilon=1e9)
        spent = told.spent
    assert told.record["epsilon"] == pytest.approx(case["pld"], rel=1e-6)
    assert told.record["epsilon"] == pytest.approx(case["prv"], rel=0.01)


def test_google_and_opacus_agree_within_a_hundredth() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld  # neither is needed by the other tests
    from opacus.accountants import PRVAccountant

    found = pld.from_gaussian_mechanism(3.0).self_compose(20).get_epsilon_for_delta(1e-5)
    assert epsilon_of(20 / 9, 1e-5) == pytest.approx(found, rel=0.01)
    prv = PRVAccountant()
    prv.history = [(3.0, 1 - 1e-9, 20)]
    assert prv.get_epsilon(1e-5) == pytest.approx(found, rel=0.01)


def test_delta_by_hand_and_far_out() -> None:
    """mu 1, epsilon 0: Phi(1/2) - Phi(-1/2) = erf(1 / sqrt 8); at mu 100 nothing overflows."""
    assert delta_of(0.0, 1.0) == pytest.approx(math.erf(1 / math.sqrt(8)))
    assert 5000 < epsilon_of(1e4, 1e-5) < 5500
    assert 0 < epsilon_of(1e-8, 1e-5) < 1e-3


@pytest.mark.parametrize("lie", [1e6, -1e6, 1e18])
def test_a_liar_moves_the_model_by_the_clip_over_the_denominator(store: ObjectStore, lie: float) -> None:
    """Over all its parts together, beside honest devices whose contribution it does not change."""
    previous = state_of(store, task=part(1.0, 2.0), other=part(3.0))
    honest = [sent(store, f"d{i}", task=part(1.3, 2.0), other=part(3.0)) for i in range(3)]
    liar = sent(store, "liar", 10**9, task=part(lie, lie), other=part(-lie))
    terms = RoundTerms(devices=4, entropy=no_noise)
    without, _, _ = combined(store, honest, previous, terms)
    found, _, record = combined(store, [*honest, liar], previous, terms)
    moved = math.sqrt(sum(float(((found[name] - without[name]) ** 2).sum()) for name in found))
    assert moved == pytest.approx(1 / 4, rel=1e-4)
    np.testing.assert_allclose(without["task"], [1 + 3 * 0.3 / 4, 2.0], rtol=1e-6)
    assert record["parts"]["task"]["devices"] == dict.fromkeys(["d0", "d1", "d2", "liar"], 0.25)
    assert "norms" not in record["screened"]


def test_the_denominator_is_fixed_whoever_comes(store: ObjectStore) -> None:
    previous = state_of(store, task=part(1.0))
    updates = [sent(store, f"d{i}", 1 + i, task=part(1.5)) for i in range(5)]
    for count in (1, 2, 5):
        found, _, _ = combined(store, updates[:count], previous, RoundTerms(devices=2, entropy=no_noise))
        assert found["task"].tolist() == [pytest.approx(1 + count * 0.5 / 2)]
    found, _, record = combined(store, updates, previous, RoundTerms(devices=2, entropy=no_noise), denominator=10)
    assert found["task"].tolist() == [pytest.approx(1.25)]
    assert record["noise"] == {"denominator": 10, "deviation": pytest.approx(0.001), "longest": 1.0}


def test_every_part_of_the_stage_gets_noise_and_buffers_stay(store: ObjectStore) -> None:
    """The part that nobody trained, and the one whose only update cannot be calculated with, as any other."""
    weights = {"w": np.zeros(40_000, np.float32)}
    kept = {"n.running_mean": np.ones(1, np.float32), "n.num_batches_tracked": np.array(3)}
    changed = {"n.running_mean": np.zeros(1, np.float32), "n.num_batches_tracked": np.array(9)}
    previous = state_of(store, task={**weights, **kept}, nobody=weights, broken=weights, untrained=weights)
    nan = {"w": np.full(40_000, np.nan, np.float32)}
    updates = [sent(store, "a", task={**weights, **changed}, broken=nan)]
    terms = RoundTerms(devices=5, trained=("task", "nobody", "broken"), entropy=np.random.default_rng(3).bytes)
    found, state, record = combined(store, updates, previous, terms, noise=2.0, clip=0.5)
    for name in terms.trained:
        assert found[name].std() == pytest.approx(2.0 * 0.5 / 5, rel=0.02), name
        assert abs(found[name].mean()) < 0.004, name
    assert abs(np.corrcoef(found["task"], found["nobody"])[0, 1]) < 0.02
    assert state["untrained"] == previous["untrained"]
    tensors = decode_part(store.read(state["task"].id))
    assert (tensors["n.running_mean"].tolist(), tensors["n.num_batches_tracked"].tolist()) == ([1.0], 3)
    assert [one["part"] for one in record["refused"]] == ["broken"]


def test_noise_is_normal_and_no_seed_repeats_it(store: ObjectStore) -> None:
    draws = gaussians(400_001, np.random.default_rng(1).bytes)
    assert draws.size == 400_001
    assert np.abs([draws.mean(), draws.std() - 1, (draws**3).mean(), (draws**4).mean() - 3]).max() < 0.03
    assert (np.abs(draws) > 3).mean() == pytest.approx(0.0027, rel=0.1)
    large = with_noise({"w": np.zeros(600_000, np.float32)}, {}, 0.5, np.random.default_rng(2).bytes)["w"]
    assert large.std() == pytest.approx(0.5, rel=0.01)  # over several blocks
    assert len(np.unique(large)) > 590_000
    previous = state_of(store, task=part(*[0.0] * 50))
    update = sent(store, "a", task=part(*[0.0] * 50))
    first, second = (combined(store, [update], previous, RoundTerms(seed=7))[0]["task"] for _ in range(2))
    assert not np.array_equal(first, second)


def test_the_account_goes_on_from_the_state(store: ObjectStore) -> None:
    """Two rounds of noise 1 cost epsilon 6.57, three 8.39: with 8 the second is the last, of a resumed run as well."""
    state = state_of(store, task=part(0.0))
    terms = RoundTerms(devices=2, stage=1)
    recipe = {"combine": {"gaussian_noise": {"noise": 1.0, "epsilon": 8.0}}}
    told = []
    for _ in range(2):
        updates = [sent(store, "a", task=part(1.0))]
        state, record = aggregate_round(updates, store, state, recipe, terms)
        told.append((record["account"]["epsilon"], bool(history.load(store, state).over)))
    assert told == [(pytest.approx(4.377, rel=1e-3), False), (pytest.approx(6.573, rel=1e-3), True)]
    assert epsilon_of(3.0, 1e-5) > 8
    memory = history.load(store, state)
    assert memory.ended(1)
    assert memory.ended(2)


def test_noise_that_is_not_given_is_what_the_rounds_need(tmp_path: Path, store: ObjectStore) -> None:
    """Of 1, 12 and 300 planned rounds all take place, and cost the budget to a thousandth."""
    for planned in (1, 12, 300):
        cost = spending(plan_of(tmp_path, "dp-fedavg", "ab", 2, [f"training.rounds=[{planned}, 0]"]))
        assert cost is not None
        assert cost.rounds == cost.planned == planned
        assert 0.999 * 8 < cost.epsilon <= 8
    previous, terms = state_of(store, task=part(0.0)), RoundTerms(devices=4, rounds=12)
    _, record = aggregate_round([], store, previous, {"combine": {"gaussian_noise": {"clip": 2.0}}}, terms)
    z = record["noise"]["deviation"] * 4 / 2
    assert epsilon_of(12 / z**2, 1e-5) == pytest.approx(8, rel=1e-5)
    assert record["account"]["epsilon"] == pytest.approx(epsilon_of(z**-2, 1e-5))


PRIVATE = [
    "slots.schedule=layerwise",
    "slots.combine={gaussian_noise: {noise: 1.5, epsilon: 6.5}}",
    "evaluate=stage",
    "training.rounds=[2, 9]",
]


def test_a_run_ends_before_it_exceeds_its_budget(tmp_path: Path) -> None:
    """With noise 1.5 four rounds cost epsilon 6.13 and five 7.00: of 2 and 9 planned ones 2 and 2 take place."""
    plan = plan_of(tmp_path, "dp-fedavg", "ab", 2, PRIVATE)
    cost = spending(plan)
    assert cost is not None
    assert (cost.rounds, cost.planned) == (4, 11)
    assert "the budget of epsilon is spent after 4 of 11 rounds" in warnings_of(plan)[0]
    assert (plan.policy.clip_change, plan.policy.largest_change, plan.model.head.norm) == (0, 0, "layer")
    report = run_fleet(tmp_path, plan, {f"d{i}": share(12, {"a": 1.0, "b": 1.0}, seed=i) for i in range(2)})
    assert report.status == "done"
    assert [(row.stage, row.round) for row in report.rounds] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    epsilons = [row.record["account"]["epsilon"] for row in report.rounds]
    assert epsilons[-1] == pytest.approx(cost.epsilon)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] <= 6.5
    assert epsilon_of(5 / 1.5**2, 1e-5) > 6.5
    assert {row.stage for row in report.evaluations} == {1, 2}
    told = [event.data for event in report.events if event.kind == "round_closed"]
    assert told[-1]["account"]["epsilon"] == epsilons[-1]
    last = [event.data for event in report.events if event.kind == "stage_finished"][-1]
    assert last == {"planned": 9, "unspent": 0}
    grid = rounds(report)
    (at,) = [place for place, column in enumerate(grid.columns) if column.name == "epsilon"]
    assert [line[at].text for line in grid.rows] == ["2.75", "4.09", "5.17", "6.13"]
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        stored = ledger.states("tiny")[2, 2]
    memory = history.load(ObjectStore(tmp_path / "run" / "objects"), stored)
    assert memory.over
    state = State(plan=plan, stage=2, number=2, memory=memory)  # as a coordinator that resumes the run has it
    assert round_after(state, 1, 2) is None
    assert round_after(state, 2, 2) is None
    assert undo_of(state) is None


@pytest.mark.slow
def test_a_run_that_goes_on_goes_on_with_its_account(tmp_path: Path) -> None:
    """Cut off after two of its four rounds; a resumed run that had forgotten them would take four more."""
    share(40, {"a": 1.0, "b": 1.0}, seed=5).save_npz(tmp_path / "all.npz")
    encoder = {"kind": "sensor", "width": 8, "depth": 1, "heads": 2, "patch": 4}
    values: dict[str, Any] = {
        "recipe": "dp-fedavg",
        "name": "cut",
        "data": {"source": tmp_path / "all.npz"},
        "model": {"stages": 1, "encoders": {"a": encoder, "b": encoder}, "head": {"width": 8, "out": 8}},
        "slots": {"combine": {"gaussian_noise": {"noise": 1.5, "epsilon": 6.5}}},
        "training": {"rounds": [11], "batch_size": 6},
        "evaluate": "stage",
        "fleet": [{"name": "x"}, {"name": "y"}],
    }

    class CutError(Exception):
        pass

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == "round_started" and event.round == 3:
            raise CutError

    more: dict[str, Any] = {"directory": tmp_path / "runs", "in_process": True, "export": False, "page": False}
    with pytest.raises(CutError):
        edgefl.run(values, on_event=cut, **more)
    (begun,) = (tmp_path / "runs").iterdir()
    edgefl.run(values, resume=begun.name, **more)
    report = edgefl.load_report(begun).record
    done = [row for row in report.rounds if row.status == "done"]
    assert [row.round for row in done] == [1, 2, 3, 4]
    told = [row.record["account"]["epsilon"] for row in done]
    assert told == pytest.approx([epsilon_of(n / 1.5**2, 1e-5) for n in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        (["slots.prototypes=class_mean"], "prototypes are means of samples"),
        (["slots.cluster=lsh"], "clusters are made of their signatures"),
        (["slots.repair=poverty", "slots.cluster=lsh"], "a repair puts"),
        (["slots.pace=early_stopping"], "this pace goes by their hold-outs"),
        (["slots.select=banzhaf"], "this selection goes by their hold-outs"),
        (["slots.optimise=fedadagrad_mpo"], "this step goes by their hold-outs"),
        (["slots.weight=fediot"], "counts all devices alike"),
        (["slots.weight=own", "slots.prototypes=none"], "counts all devices alike"),
        (["rounds=async"], "rounds: combine: gaussian_noise needs the devices of one round together"),
        (["round.late=keep"], "round.late: combine: gaussian_noise needs the devices of one round together"),
        (["slots.combine={gaussian_noise: {noise: 0.5, epsilon: 2}}"], "one round with noise 0.5 costs epsilon 10 at"),
        (["model.head.norm=batch"], "model.head.norm: is batch, whose statistics"),
        (["model.encoders.a.standardize=fleet"], "model.encoders.a.standardize: is fleet"),
        (["round.clip_change=2"], "round.clip_change: compares"),
        (["round.largest_change=5"], "round.largest_change: compares"),
    ],
)
def test_what_the_account_does_not_cover_is_refused(tmp_path: Path, settings: list[str], culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, "dp-fedavg", "ab", 2, settings)
    assert culprit in str(caught.value)


def test_noise_without_an_account_cannot_register() -> None:
    with pytest.raises(ValueError, match="has noise without account and accumulate"):
        register(Combine("noisy", "", merge=lambda loaders, layout: ({}, {}), noise=lambda: None))

"""Noise split on the devices: what one sends, what the sum carries, both accounts, refusals, a fleet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from memory_fleet import plan_of, run_fleet, share
from scipy.stats import chi2
from test_coordinator_machine import Play, of
from test_privacy import part, sent, state_of

from coordinator.core import moves as do
from coordinator.runtime import model_tasks
from edgefl.aggregation import history
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.noise import Noise
from edgefl.api.run_inputs import PlanOptions, price_of
from edgefl.errors import ConfigError, DivergedError
from edgefl.methods.privacy import gaussian, noised_share
from edgefl.plan.job import Slots
from edgefl.plan.privacy import spending
from edgefl.protocol.messages import Hello
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.registry import Trained, not_installed
from edgefl.report.price_tables import price_grids
from edgefl.report.rounds import rounds
from edgefl.run_records import EventRow
from edgefl.storage.objects import ObjectStore

SIZE = 40_000
#: z C / W of five devices is 0.2, and a device's share 0.5: n is 4.
OPTIONS = {"clip": 0.5, "noise": 2.0, "epsilon": 1e9, "at": "devices"}
W, C, Z, N = 5, 0.5, 2.0, 4


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def within(values: np.ndarray, deviation: float) -> bool:
    """Whether the variance of independent normal values may be that: by chi-square, wrong once in a million."""
    ratio = float((values.astype(np.float64) ** 2).sum()) / deviation**2
    return bool(chi2.ppf(5e-7, values.size) < ratio < chi2.ppf(1 - 5e-7, values.size))


def upload(parts: Mapping[str, Any], received: Mapping[str, Any], clip: float = C, deviation: float = Z * C / 2) -> Any:
    made, kept = noised_share.send(
        Trained(parts, received, {}, {}), np.random.default_rng(1), clip=clip, deviation=deviation
    )
    assert kept == {}
    return made


def changed(value: float, size: int = SIZE) -> dict[str, np.ndarray]:
    return {"w": np.full(size, value, np.float32)}


def combined(
    store: ObjectStore, updates: list[UpdateInfo], previous: Manifest, terms: RoundTerms, **options: Any
) -> tuple[dict[str, np.ndarray], Manifest, dict[str, Any]]:
    recipe = {"combine": {"gaussian_noise": {**OPTIONS, **options}}}
    state, record = aggregate_round(updates, store, previous, recipe, terms)
    return {name: decode_part(store.read(state[name].id))["w"] for name in previous if "/" not in name}, state, record


def test_a_change_is_clipped_as_a_whole_and_buffers_are_as_received() -> None:
    """3 and 4 in two parts are 5 long: a tenth of each is left; without noise what is left is C to the last digit."""
    kept = {"n.running_mean": np.ones(1, np.float32), "n.num_batches_tracked": np.array(3)}
    other = {"n.running_mean": np.zeros(1, np.float32), "n.num_batches_tracked": np.array(9)}
    received = {"a": {**part(1.0, 0.0), **kept}, "b": part(2.0)}
    made = upload({"a": {**part(4.0, 0.0), **other}, "b": part(6.0)}, received, deviation=0.0)
    np.testing.assert_allclose(made["a"]["w"], [1.3, 0.0], rtol=1e-7)
    np.testing.assert_allclose(made["b"]["w"], [2.4], rtol=1e-7)
    assert (made["a"]["n.running_mean"].tolist(), made["a"]["n.num_batches_tracked"].tolist()) == ([1.0], 3)
    assert noised_share.length(made, received) == pytest.approx(C, rel=1e-6)
    short = {"a": {**part(1.1, 0.2), **other}, "b": part(2.0)}
    assert upload(short, received, deviation=0.0)["a"]["w"].tolist() == short["a"]["w"].tolist()
    same = upload(received, received, deviation=0.0)
    assert noised_share.length(same, received) == 0
    with pytest.raises(DivergedError, match="not finite"):
        upload({"a": {**part(np.nan, 0.0), **other}, "b": part(2.0)}, received)


def test_a_share_is_normal_on_every_part_and_no_seed_repeats_it() -> None:
    received = {"a": changed(1.0), "b": changed(0.0)}
    first, second = (upload(received, received) for _ in range(2))
    for name, before in received.items():
        assert within(first[name]["w"] - before["w"], Z * C / 2)
        assert within(first[name]["w"] - second[name]["w"], Z * C / 2 * math.sqrt(2))
    assert abs(np.corrcoef(first["a"]["w"], first["b"]["w"])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("senders", "dishonest", "variance", "added"),
    [
        (5, 1, 5 / 4, 0),  # of five shares of a quarter four count
        (4, 1, 5 / 4, 1 / 4),
        (2, 1, 5 / 4, 3 / 4),
        (1, 1, 5 / 4, 1),
        (0, 1, 1, 1),
        (5, 0, 1, 0),
        (3, 0, 1, 2 / 5),
        (8, 0, 8 / 5, 0),  # more than were planned for
        (5, 2, 5 / 3, 0),
        (5, 9, 6, 1),  # nobody counts: all is added, by everybody
    ],
)
def test_the_sum_has_the_noise_that_is_accounted_for_whoever_comes(
    store: ObjectStore, senders: int, dishonest: int, variance: float, added: float
) -> None:
    """In units of (z C / W)²; that without any ``dishonest`` of the shares is 1 at least."""
    base = {"task": changed(0.0)}
    previous, share_ = state_of(store, **base), Z * C / math.sqrt(max(1, W - dishonest))
    own = [upload(base, base, deviation=share_) for _ in range(senders)]
    updates = [sent(store, f"d{i}", **one) for i, one in enumerate(own)]
    terms = RoundTerms(devices=W, trained=("task",))
    found, _, record = combined(store, updates, previous, terms, dishonest=dishonest)
    whole = Z * C / W
    assert within(found["task"], whole * math.sqrt(variance))
    known = sum((one["task"]["w"].astype(np.float64) for one in own[:dishonest]), np.zeros(SIZE)) / W
    rest = found["task"] - known
    assert within(rest, whole * math.sqrt(max(1, variance - min(senders, dishonest) / max(1, W - dishonest))))
    assert record["parts"]["task"]["added"] == pytest.approx(whole * math.sqrt(added))
    assert record["parts"]["task"]["devices"] == dict.fromkeys(sorted(u.name for u in updates), pytest.approx(1 / W))


def test_each_part_is_topped_up_by_who_sent_it_and_was_taken(store: ObjectStore) -> None:
    """Five sent one part and three the other, one of them NaN; nobody the third: 0, (1 - 1/4) and 1 are added."""
    base = {"task": changed(0.0), "some": changed(0.0), "nobody": changed(0.0)}
    previous = state_of(store, **base)
    own = [upload({"task": base["task"]} | ({"some": base["some"]} if i < 3 else {}), base) for i in range(W)]
    own[2]["some"] = changed(np.nan)
    updates = [sent(store, f"d{i}", **one) for i, one in enumerate(own)]
    found, state, record = combined(store, updates, previous, RoundTerms(devices=W, trained=tuple(base)))
    whole = Z * C / W
    for name, variance in (("task", 5 / 4), ("some", 2 / 4 + 3 / 4), ("nobody", 1)):
        assert within(found[name], whole * math.sqrt(variance)), name
    told = {name: record["parts"][name]["added"] for name in base}
    assert told == {"task": 0, "some": pytest.approx(whole * math.sqrt(3 / 4)), "nobody": pytest.approx(whole)}
    assert [(one["device"], one["part"]) for one in record["refused"]] == [("d2", "some")]
    assert record["noise"] == {"denominator": 5, "deviation": whole, "longest": C, "shares": 4, "dishonest": 1}
    assert not record["screened"]["factors"]
    assert history.load(store, state).uploads == 1


def test_a_bare_update_is_left_out_and_a_liar_bounded(store: ObjectStore) -> None:
    """Neither is counted as a share; honest ones are never touched."""
    base = {"task": changed(0.0)}
    previous, whole = state_of(store, **base), Z * C / W
    honest = [sent(store, f"d{i}", **upload({"task": changed(1.0)}, base)) for i in range(2)]
    bare = sent(store, "old", task=changed(0.1 * C / math.sqrt(SIZE)))
    liar = sent(store, "liar", task=changed(1e9))
    terms = RoundTerms(devices=W, trained=("task",))
    found, _, record = combined(store, [*honest, bare, liar], previous, terms)
    assert record["screened"]["factors"].keys() == {"old", "liar"}
    assert record["screened"]["factors"]["old"] == 0
    assert "old sent a change without its noise, which was left out" in record["screened"]["note"]
    assert record["parts"]["task"]["added"] == pytest.approx(whole * math.sqrt(3 / 4))
    most = (C + 0.5 * (math.sqrt(SIZE) + 8.4)) / W
    assert np.linalg.norm(found["task"]) < most + whole * math.sqrt(5 / 4) * (math.sqrt(SIZE) + 9) + 2 * C / W
    _, _, told = combined(store, honest, previous, terms)
    assert told["screened"] == {"factors": {}, "bound": C}


@pytest.mark.parametrize(("z", "number", "n"), [(3.0, 20, 9), (2.7, 20, 1), (8.0, 7, 29)])
def test_both_epsilons_are_those_of_dp_accounting(z: float, number: int, n: int) -> None:
    """By Google's privacy loss distribution: of the rounds' sum, and of one device's uploads by themselves."""
    spent = 0.0
    options = {"noise": z, "delta": 1e-5, "epsilon": 1e9, "denominator": float(n + 1), "dishonest": 1.0}
    for i in range(number):
        central = gaussian.account(spent, i + 1, **{**options, "at": "server"})
        told = gaussian.account(spent, i + 1, **{**options, "at": "devices"})
        assert (told.spent, told.over, told.record["epsilon"]) == (
            central.spent,
            central.over,
            central.record["epsilon"],
        )
        spent = told.spent
    for noise, found in ((z, told.record["epsilon"]), (z / math.sqrt(n), told.record["server"])):
        loss = pld.from_gaussian_mechanism(noise, value_discretization_interval=1e-3).self_compose(number)
        assert found == pytest.approx(loss.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert "server" not in central.record


def test_a_round_that_was_tried_again_counts_as_often_towards_the_server(store: ObjectStore) -> None:
    """Readers have one model of it; the server had an upload, with other noise, in each of its three attempts."""
    state, told = state_of(store, task=changed(0.0, 50)), []
    for attempts in (1, 3, 1):
        terms = RoundTerms(devices=W, stage=1, trained=("task",), attempts=attempts)
        _, state, record = combined(store, [], state, terms)
        told.append((record["account"]["epsilon"], record["account"]["server"]))
    for (readers, server), rounds_, uploads in zip(told, (1, 2, 3), (1, 4, 5), strict=True):
        assert readers == pytest.approx(gaussian.epsilon_of(rounds_ / Z**2, 1e-5))
        assert server == pytest.approx(gaussian.epsilon_of(uploads * N / Z**2, 1e-5))


def test_what_is_lacking_by_hand() -> None:
    """Of four shares three: a quarter of the variance; the server's own noise lacks as a whole."""
    assert Noise(5, 0.2, 1, shares=4, dishonest=1).lacking(4) == pytest.approx(0.1)
    assert Noise(5, 0.2, 1, shares=4, dishonest=1).lacking(5) == 0
    assert Noise(5, 0.2, 1).lacking(5) == 0.2


SPLIT = "slots.combine={gaussian_noise: {clip: 0.01, epsilon: 8, at: devices}}"


def test_the_plan_gives_devices_the_numbers_that_the_server_has(tmp_path: Path) -> None:
    """z follows from the rounds once, for both sides; the plan says both epsilons, by formula those of the rounds."""
    plan = plan_of(tmp_path, "dp-fedavg", "ab", 4, [SPLIT, "training.rounds=[12, 0]"])
    central = plan_of(tmp_path, "dp-fedavg", "ab", 4, [SPLIT.replace("devices", "server"), "training.rounds=[12, 0]"])
    z = gaussian.noise_for(12, 8, 1e-5)
    assert plan.slots.upload == {"noised_share": {"clip": 0.01, "deviation": pytest.approx(z * 0.01 / math.sqrt(3))}}
    assert central.slots.upload == {"whole": {}}
    cost, trusted = spending(plan), spending(central)
    assert cost is not None
    assert trusted is not None
    assert cost._replace(server=0.0) == trusted
    assert cost.server == pytest.approx(gaussian.epsilon_of(12 * 3 / z**2, 1e-5))
    price = price_of(str(tmp_path / "run.yaml"), [SPLIT, "training.rounds=[12, 0]"], PlanOptions(("cpu",)))
    notes = " ".join(note for grid in price_grids(price) for note in grid.notes)
    assert f"epsilon 8 (delta 1e-05), and {cost.server:.3g} towards the server" in notes


def test_a_fleet_sends_nothing_bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives differs from what was offered by noise alone, of which a clip of 0.01 hides nothing."""
    seen: list[tuple[str, np.ndarray]] = []

    def spied(updates: Any, store: ObjectStore, previous: Manifest, *rest: Any) -> Any:
        for update in updates:
            for name in update.manifest:
                now, before = (decode_part(store.read(one[name].id)) for one in (update.manifest, previous))
                seen.extend((update.device, now[k] - before[k]) for k in now if now[k].dtype.kind == "f")
        return aggregate_round(updates, store, previous, *rest)

    monkeypatch.setattr(model_tasks, "aggregate_round", spied)
    plan = plan_of(tmp_path, "dp-fedavg", "ab", 3, [SPLIT, "training.rounds=[2, 0]"])
    own = {"d0": {"a": 1.0}, "d1": {"a": 1.0, "b": 1.0}, "d2": {"a": 1.0, "b": 1.0}}
    shares = {name: share(12, present, seed=i) for i, (name, present) in enumerate(own.items())}
    report = run_fleet(tmp_path, plan, shares)
    assert report.status == "done"
    deviation = plan.slots.upload["noised_share"]["deviation"]
    assert isinstance(deviation, float)
    assert len(seen) > 20
    for device in own:
        values = np.concatenate([change.ravel() for name, change in seen if name == device])
        assert within(values, deviation), device
    z = gaussian.noise_for(2, 8, 1e-5)
    for row in report.rounds:
        whole, n = z * 0.01 / 3, 2
        assert row.record["noise"]["deviation"] == pytest.approx(whole)
        added = {name: told["added"] for name, told in row.record["parts"].items()}
        assert added["task"] == 0
        assert added["head/b"] == pytest.approx(whole * math.sqrt(1 - 1 / n))  # by d1 and d2 alone
        assert not row.record["screened"]["factors"]
        assert not row.record["refused"]
    last = report.rounds[-1].record["account"]
    assert last["epsilon"] == pytest.approx(8, rel=1e-5)
    assert last["server"] == pytest.approx(gaussian.epsilon_of(2 * n / z**2, 1e-5))
    text = f"epsilon 8 of 8 (delta 1e-05), {last['server']:.3g} towards the server."
    assert text in rounds(report).notes[-1]
    told = [event.data for event in report.events if event.kind == "round_closed"]
    assert told[-1]["account"] == last


def test_a_device_that_does_not_know_it_is_refused(tmp_path: Path) -> None:
    """One that lacks the method declines by its name; one of before there were uploads is not offered anything."""
    assert not_installed({"upload": {"of_tomorrow": {}}}) == "not installed on this device: upload: of_tomorrow"
    plan = plan_of(tmp_path, "dp-fedavg", "ab", 2, [SPLIT])
    text = (
        "a is refused: this run has devices add noise to what they send, and the device's release does not know of it"
    )
    for slots, told in ((plan.slots, [text]), (Slots(), [])):
        run = Play(slots=slots, server=plan.server)
        out = run.send(do.Joined(0.0, Hello("a", "s", samples={"": 9}, protocol=0)))
        assert len(of(do.SendDrain, out)) == len(told)
        assert [one.data["text"] for one in of(EventRow, out) if one.kind == "warning"] == told


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        (["transfer.up=int8"], "transfer.up: is int8, and noise that devices add is known to add up only"),
        (["transfer.up={task: delta+top}"], "transfer.up: is delta+top"),
        (["slots.upload=noised_share"], "upload: with at: devices it is their changes with noise"),
        (["slots.prototypes=class_mean"], "prototypes are means of samples"),
        (["slots.repair=poverty", "slots.cluster=lsh"], "a repair puts"),
        (["rounds=async"], "rounds: combine: gaussian_noise needs the devices of one round together"),
        (["model.head.norm=batch"], "model.head.norm: is batch, whose statistics"),
        (["slots.combine={gaussian_noise: {at: phones}}"], "gaussian_noise.at is 'phones'"),
        (
            ["slots.combine=mean", "slots.upload=noised_share"],
            "is what combine: gaussian_noise sets; leave slots.upload out, and set slots.combine: {gaussian",
        ),
    ],
)
def test_what_is_not_covered_is_refused(tmp_path: Path, settings: list[str], culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, "dp-fedavg", "ab", 2, [SPLIT, *settings])
    assert culprit in str(caught.value)

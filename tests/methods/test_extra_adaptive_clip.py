"""The example package's adaptive clipping: the clip by hand and over rounds, its account, what it is refused beside."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from extra_fixture import extra
from memory_fleet import plan_of

from edgefl import registry
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.errors import ConfigError
from edgefl.plan.privacy import spending
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore

module = extra("adaptive_clip")


def no_noise(size: int) -> bytes:
    """Bits of which the first of each pair gives the radius 0."""
    return b"\xff" * (size // 2) + bytes(size // 2)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._methods, "combine", dict(registry.methods("combine")))
    registry.register(module.ADAPTIVE_CLIP)


def after(
    store: ObjectStore, state: Manifest, lengths: list[float], **options: float
) -> tuple[Manifest, np.ndarray, dict]:
    """A round of devices whose changes are along one axis each, and the model after it."""
    start = decode_part(store.read(state["task"].id))["w"]
    updates = []
    for k, length in enumerate(lengths):
        ref = store.put(encode_part({"w": start + length * np.eye(len(start), dtype=np.float32)[k]}))
        updates.append(UpdateInfo(f"d{k}", {"task": ref}, {"task": 10 + k}))
    terms = RoundTerms(devices=len(lengths), trained=("task",), entropy=no_noise)
    recipe = {"combine": {"adaptive_clip": {"epsilon": 1e9, **options}}}
    state, record = aggregate_round(updates, store, state, recipe, terms)
    return state, decode_part(store.read(state["task"].id))["w"] - start, record


def test_the_clip_follows_the_quantile_from_round_to_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C = 2, lengths 1, 2, 4, 8: two of four are whole, b = 1/2, γ = 3/4: C' = 2 exp(0.5 / 4)."""
    monkeypatch.setattr(module, "entropy", no_noise)
    store = ObjectStore(tmp_path / "objects")
    state: Manifest = {"task": store.put(encode_part({"w": np.zeros(4, np.float32)}))}
    options = {"clip": 2.0, "quantile": 0.75, "rate": 0.5}
    state, moved, record = after(store, state, [1, 2, 4, 8], **options)
    np.testing.assert_allclose(moved, np.array([1, 2, 2, 2]) / 4, rtol=1e-6)
    assert record["screened"]["next"] == pytest.approx(2 * math.exp(0.125))
    state, moved, record = after(store, state, [1, 2, 4, 8], **options)
    np.testing.assert_allclose(moved, np.array([1, 2, 2.2663, 2.2663]) / 4, rtol=1e-4)
    assert record["combine"]["clip"] == pytest.approx(2 * math.exp(0.125))
    for _ in range(20):
        state, _, record = after(store, state, [1, 2, 4, 8], **options)
    assert record["screened"]["bound"] == pytest.approx(2 * math.exp(0.5 / 4 * 6))  # above 4, three of four are whole
    assert record["account"]["epsilon"] > 0


def test_the_count_is_noisy_and_kept_within_its_bounds(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path / "objects")
    state: Manifest = {"task": store.put(encode_part({"w": np.zeros(4, np.float32)}))}
    options = {"clip": 2.0, "quantile": 0.5, "rate": 1.0, "noise": 3.0, "share": 0.1}
    found = np.array([after(store, state, [1, 1, 3, 3], **options)[2]["screened"]["next"] for _ in range(60)]) / 2
    assert math.exp(-0.5) * (1 - 1e-9) <= found.min() < 0.7
    assert 1.5 < found.max() <= math.exp(0.5) * (1 + 1e-9)
    assert len(np.unique(found)) > 5


def test_sum_and_count_cost_together_what_is_accounted() -> None:
    """By dp-accounting, of 20 rounds of the two Gaussian mechanisms, each composed by itself."""
    z, share = 3.0, 0.1
    noise = module.noise_of(clip=0.7, noise=z, share=share, denominator=4)
    assert noise.longest == 0.7
    of_sum, of_count = noise.deviation * 4 / 0.7, z / math.sqrt(share)
    accountant = PLDAccountant()
    for one in (of_sum, of_count):
        accountant.compose(dp_event.GaussianDpEvent(one), 20)
    spent = 0.0
    for _ in range(20):
        told = module.ADAPTIVE_CLIP.account(spent, 20, noise=z, delta=1e-5, epsilon=1e9)
        spent = told.spent
    assert told.record["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


SETTINGS = ["slots.combine={adaptive_clip: {noise: 1.5, epsilon: 6.5}}", "training.rounds=[2, 9]"]


def test_a_plan_says_what_its_rounds_cost(tmp_path: Path) -> None:
    """As gaussian_noise with noise 1.5: of 11 rounds four take place."""
    cost = spending(plan_of(tmp_path, "dp-fedavg", "ab", 2, SETTINGS))
    assert cost is not None
    assert (cost.rounds, cost.noise) == (4, pytest.approx(1.5 / math.sqrt(0.9) / 2))


@pytest.mark.parametrize(
    ("setting", "culprit"),
    [
        ("slots.prototypes=class_mean", "adaptive_clip accounts for the devices' changes alone, and prototypes are"),
        ("slots.cluster=lsh", "clusters are made of their signatures"),
        ("slots.repair=poverty", "a repair puts"),
        ("slots.pace=early_stopping", "this pace goes by their hold-outs"),
        ("slots.select=banzhaf", "this selection goes by their hold-outs"),
        ("slots.optimise=fedadagrad_mpo", "this step goes by their hold-outs"),
        ("model.head.norm=batch", "model.head.norm: is batch, whose statistics"),
        ("rounds=async", "adaptive_clip needs the devices of one round together"),
        ("slots.combine={adaptive_clip: {noise: 0.5, epsilon: 2}}", "combine.adaptive_clip: one round with noise 0.5"),
    ],
)
def test_it_is_refused_beside_what_its_account_does_not_cover(tmp_path: Path, setting: str, culprit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, "dp-fedavg", "ab", 2, [*SETTINGS, setting])
    assert culprit in str(caught.value)


def test_an_account_is_of_whole_rounds_and_of_clipped_changes() -> None:
    for changes, why in (({"per_round": False}, "without per_round=True"), ({"screen": None}, "screen")):
        with pytest.raises(ValueError, match=why):
            registry.register(replace(module.ADAPTIVE_CLIP, name="other", **changes))

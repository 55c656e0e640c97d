"""The example package's upload: priorities by hand, and devices that send one modality a round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from extra_fixture import extra
from memory_fleet import plan_of, run_fleet, share

from edgefl import registry
from edgefl.models.spec import modality_of
from edgefl.registry import Trained

module = extra("mfedmc")
LOSSES = {frozenset("a"): 1.0, frozenset("b"): 0.6, frozenset("ab"): 0.4}


def trained(kept: dict[str, np.ndarray] | None = None, losses: dict[frozenset[str], float] = LOSSES) -> Trained:
    parts = {"a/embed": 2, "a/stage1": 4, "head/a": 1, "b/stage1": 3, "task": 9}
    return Trained({part: {"w": np.zeros(size, np.float32)} for part, size in parts.items()}, {}, losses, kept or {})


def sent(given: Trained, impact: float, size: float, recency: float, gamma: float = 1) -> tuple[set[str], dict]:
    rng = np.random.default_rng(0)
    parts, kept = module.send(given, rng, gamma=gamma, impact=impact, size=size, recency=recency)
    assert all(parts[part] is given.parts[part] for part in parts)
    return set(parts), {name: int(value[0]) for name, value in kept.items()}


def test_shapley_values_are_those_of_the_game_of_losses() -> None:
    """S(a) = 1/2 (0 - 1.0) + 1/2 (0.6 - 0.4) = -0.4; S(b) = 1/2 (0 - 0.6) + 1/2 (1.0 - 0.4) = 0."""
    assert [module.shapley(LOSSES, m, 2) for m in "ab"] == pytest.approx([-0.4, 0.0])
    three = {frozenset(some): float(len(some)) for some in ("a", "b", "c", "ab", "ac", "bc", "abc")}
    three[frozenset("abc")] = 1.0  # a: 1/3 (0 - 1) + 2 * 1/6 (1 - 2) + 1/3 (2 - 1)
    assert module.shapley(three, "a", 3) == pytest.approx(-1 / 3)
    assert module.shapley({}, "a", 2) == 0


def test_impact_size_and_recency_each_choose() -> None:
    a, b = {"a/embed", "a/stage1", "head/a", "task"}, {"b/stage1", "task"}
    assert sent(trained(), 1, 0, 0) == (b, {"last/a": -1, "last/b": 0, "rounds": 1})
    better = {**LOSSES, frozenset("a"): 0.5}
    assert sent(trained(losses=better), 1, 0, 0)[0] == a
    assert sent(trained(), 0, 1, 0)[0] == b, "3 values are less than 7"
    kept = {"last/a": np.array([-1]), "last/b": np.array([0]), "rounds": np.array([1])}
    assert sent(trained(kept), 0, 0, 1) == (a, {"last/a": 1, "last/b": 0, "rounds": 2})
    assert sent(trained(kept), 0.49, 0, 1)[0] == a, "recency 2/2 and 1/2: impact has to outweigh 0.5"
    assert sent(trained(kept), 0.51, 0, 1)[0] == b
    assert sent(trained(), 1, 1, 1, gamma=2)[0] == a | b


def test_ties_are_drawn() -> None:
    given = trained(losses={})
    found = [
        set(module.send(given, np.random.default_rng(n), gamma=1, impact=1, size=0, recency=1)[0]) for n in range(9)
    ]
    assert {len(parts) for parts in found} == {2, 4}


def test_the_price_is_that_of_the_largest_choice() -> None:
    sizes = {"a/embed": 20, "head/a": 1, "b/stage1": 30, "task": 100}
    assert [module.most(sizes, gamma=n) for n in (1, 2, 3)] == [130, 151, 151]


def test_a_fleet_sends_one_modality_a_device_and_round(ram_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._methods, "upload", dict(registry.methods("upload")))
    registry.register(module.MFEDMC)
    changes = ["slots.upload={mfedmc: {impact: 0, size: 0, recency: 1}}", "training.rounds=[3, 0]"]
    plan = plan_of(ram_path, "end_to_end", "ab", 2, changes)
    report = run_fleet(ram_path, plan, {f"d{i}": share(24, {"a": 1.0, "b": 1.0}, seed=i) for i in range(2)})
    assert report.status == "done"
    chosen: dict[str, list[set[str]]] = {"d0": [], "d1": []}
    for row in report.rounds:
        weights = {part: told["devices"] for part, told in row.record["parts"].items()}
        assert weights["task"].keys() == chosen.keys()
        for device, rounds in chosen.items():
            rounds.append({m for part in weights if device in weights[part] and (m := modality_of(part))})
    for rounds in chosen.values():
        first, second, third = rounds
        assert len(first) == 1
        assert (first | second, third) == ({"a", "b"}, first), "the one that waited longer"
    for row in report.assignments:
        predicted, measured = (figures["payload_up_bytes"].value for figures in (row.predicted, row.measured))
        assert measured == pytest.approx(predicted, rel=0.2)
        assert measured <= predicted

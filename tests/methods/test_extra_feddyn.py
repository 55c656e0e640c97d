"""The example package's FedDyn: against a second implementation, on one device over two rounds, in a fleet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from extra_fixture import extra
from memory_fleet import plan_of, run_fleet, share, state_of
from training_fixture import CROSS_ENTROPY, dataset, job, parts_of

from edgefl import registry
from edgefl.aggregation.history import Memory, Track
from edgefl.config.profiles import load_recipe
from edgefl.errors import ConfigError, ModelError
from edgefl.models.parts import part_tensors
from edgefl.models.staged import build
from edgefl.pricing.round_price import price_step
from edgefl.protocol.tensors import decode_part
from edgefl.roles import Objective
from edgefl.training.local_round import LocalState, train_round

module = extra("feddyn")
CURVATURE, CENTRE = np.array([1.0, 4.0, 2.0]), np.array([[3.0, 0.0], [-1.0, 2.0], [0.0, -4.0]])


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in (module.TERM, module.STEP, module.EQUAL):
        monkeypatch.setitem(registry._methods, method.role, dict(registry.methods(method.role)))
        registry.register(method)


def exactly(k: int, theta: np.ndarray, g: np.ndarray, alpha: float) -> np.ndarray:
    """The minimum of a/2 |θ - c|² - <g, θ> + α/2 |θ - theta|²."""
    return (CURVATURE[k] * CENTRE[k] + g + alpha * theta) / (CURVATURE[k] + alpha)


def second_implementation(rounds: list[list[int]], alpha: float) -> np.ndarray:
    """Algorithm 1 of the paper, line by line, of three devices with quadratic losses."""
    theta, h, gradients = np.zeros(2), np.zeros(2), np.zeros((3, 2))
    for present in rounds:
        models = {k: exactly(k, theta, gradients[k], alpha) for k in present}
        for k in present:
            gradients[k] -= alpha * (models[k] - theta)
        h = h - alpha / 3 * sum(models[k] - theta for k in present)
        theta = sum(models.values()) / len(present) - h / alpha
    return theta


def by_the_package(rounds: list[list[int]], alpha: float) -> np.ndarray:
    theta, state, kept = {"w": np.zeros(2, np.float32)}, None, {k: np.zeros(2) for k in range(3)}
    memory = Memory(devices={str(k): Track() for k in range(3)})
    for present in rounds:
        models = {k: exactly(k, theta["w"], kept[k], alpha) for k in present}
        for k in present:
            kept[k] = module.keep(kept[k], theta["w"], models[k], alpha=alpha)
        weights = module.equal({str(k): 10 * k + 1 for k in present}, {})
        mean = sum(weights[str(k)] * models[k] for k in present).astype(np.float32)
        changed, _ = module.share(memory, {}, weights, devices=0)
        theta, state = module.step(state, theta, {"w": mean}, alpha=alpha, **changed)
    return theta["w"]


def test_rounds_are_those_of_a_second_implementation() -> None:
    rounds = [[0, 1], [2], [0, 1, 2], [1, 2], [0]]
    np.testing.assert_allclose(by_the_package(rounds, 0.5), second_implementation(rounds, 0.5), rtol=1e-5)
    np.testing.assert_allclose(by_the_package([[0], [1]], 2.0), second_implementation([[0], [1]], 2.0), rtol=1e-5)


def test_unlike_devices_meet_at_the_minimum_of_the_mean_loss() -> None:
    """Σ a c / Σ a = (3 - 4, 8 - 8) / 7; the mean of the devices' own minima, FedAvg's end, is another."""
    np.testing.assert_allclose(by_the_package([[0, 1, 2]] * 200, 0.5), [-1 / 7, 0], atol=1e-3)


def test_the_term_is_the_papers() -> None:
    parameter, received, kept = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 1.0]), torch.ones(2)
    auxiliary = SimpleNamespace(received={"w": (parameter, received)}, kept={"feddyn": {"w": 2 * kept}})
    forward = SimpleNamespace(auxiliary=auxiliary, nothing=lambda: torch.zeros(()))
    value = module.loss(forward, alpha=0.5)
    value.backward()
    assert value.item() == pytest.approx(0.25 * (1 + 4) - 2 * (1 + 3))
    assert parameter.grad.tolist() == [-2 + 0.5 * 1, -2 + 0.5 * 2]


def test_a_device_goes_on_with_what_it_kept() -> None:
    made, data = job(objective={**CROSS_ENTROPY, "feddyn": {"alpha": 0.5}}), dataset(24)
    parts = parts_of(made)
    first = train_round(made, data, parts, LocalState(), salt="1")
    g = first.kept["objective/feddyn"]
    trained = {f"{part}|{name}": t for part, own in first.parts.items() for name, t in own.items()}
    for name, value in g.items():
        part, _, tensor = name.partition("|")
        np.testing.assert_allclose(value, -0.5 * (trained[name] - parts[part][tensor]), atol=1e-7)
    assert max(float(np.abs(value).max()) for value in g.values()) > 1e-4
    second = train_round(made, data, parts, LocalState(kept=first.kept), salt="1")
    afresh = train_round(made, data, parts, LocalState(), salt="1")
    np.testing.assert_array_equal(afresh.parts["task"]["weight"], first.parts["task"]["weight"])
    assert np.abs(second.parts["task"]["weight"] - first.parts["task"]["weight"]).max() > 1e-4
    moved = second.parts["task"]["weight"] - parts["task"]["weight"]
    np.testing.assert_allclose(
        second.kept["objective/feddyn"]["task|weight"], g["task|weight"] - 0.5 * moved, atol=1e-7
    )


SHARES = {"x": share(24, {"a": 1.0, "b": 1.0}, 1), "y": share(36, {"a": 1.0, "b": 1.0}, 2)}


def weights_of(directory: Path, rounds: int, slots: list[str]) -> dict[str, np.ndarray]:
    """The classifier's weights before ("first") and after a run of a fleet, and h of them where there is one."""
    directory.mkdir()
    settings = [f"training.rounds=[0,{rounds}]", "slots.weight=equal", "model.head.norm=layer", *slots]
    plan = plan_of(directory, "end_to_end", "ab", 2, settings)
    assert run_fleet(directory, plan, SHARES).status == "done"
    store, state = state_of(directory)
    found = {key: decode_part(store.read(ref.id))["weight"] for key, ref in state.items() if key.endswith("task")}
    return found | {"first": part_tensors(build(plan.model, ["task"], seed=plan.seed), "task")["weight"]}


DYNAMIC = ["slots.objective={cross_entropy: {}, feddyn: {alpha: 0.3}}", "slots.optimise={feddyn: {alpha: 0.3}}"]


def test_the_first_round_goes_as_far_again_as_fedprox(tmp_path: Path) -> None:
    """g = 0, all devices take part: h = -α (mean - θ), and θ' = mean - h / α = 2 mean - θ, mean that of FedProx."""
    dyn = weights_of(tmp_path / "dyn", 1, DYNAMIC)
    prox = weights_of(tmp_path / "prox", 1, ["slots.objective={cross_entropy: {}, proximal: {weight: 0.3}}"])
    np.testing.assert_allclose(dyn["task"], 2 * prox["task"] - dyn["first"], atol=1e-6)
    np.testing.assert_allclose(dyn["server/optimise/task"], -0.3 * (prox["task"] - dyn["first"]), atol=1e-6)
    assert np.abs(dyn["server/optimise/task"]).max() > 1e-4


def test_devices_of_a_fleet_go_on_with_what_they_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dyn = weights_of(tmp_path / "dyn", 2, DYNAMIC)
    forgetful = replace(module.TERM, keep=lambda kept, received, trained: np.zeros_like(kept))
    monkeypatch.setitem(registry._methods["objective"], "feddyn", forgetful)
    forgets = weights_of(tmp_path / "forgets", 2, DYNAMIC)
    assert np.abs(dyn["task"] - forgets["task"]).max() > 1e-4


def test_two_copies_of_what_is_trained_are_priced() -> None:
    plain, dyn = job(), job(objective={**CROSS_ENTROPY, "feddyn": {}})
    weights = [price_step(made, {"a": 6, "b": 6}).memory["weights"] for made in (plain, dyn)]
    model = build(plain.model, plain.stage.trained)
    assert weights[1] - weights[0] == 2 * sum(p.nbytes for p in model.parameters())


def test_one_half_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="feddyn needs its other half with the same alpha"):
        load_recipe("end_to_end", {"optimise": {"feddyn": {}}})


def test_what_a_term_keeps_is_as_large_as_the_parameter() -> None:
    registry.register(Objective("short", "a test's", loss=lambda f: f.nothing(), keep=lambda k, r, t: t[:0]))
    made = job(objective={**CROSS_ENTROPY, "short": {}})
    with pytest.raises(ModelError, match=r"objective: short keeps \[0.*\] of a/stage3\|"):
        train_round(made, dataset(24), parts_of(made), LocalState())


def test_sampled_trains_other_parts_than_those_of_which_devices_keep_a_state(tmp_path: Path):
    slots = ["slots.objective={cross_entropy: {}, feddyn: {}}", "slots.schedule=sampled"]
    plan_of(tmp_path, "end_to_end", "ab", 1, slots[1:])
    with pytest.raises(ConfigError, match="devices keep something of the parts that they trained before; leave the"):
        plan_of(tmp_path, "end_to_end", "ab", 1, slots)

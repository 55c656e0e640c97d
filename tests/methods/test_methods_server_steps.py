"""How the server steps: the portfolio's momentum and the optimisers, by hand and against torch's own."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from edgefl.aggregation.history import Memory, Track
from edgefl.errors import ModelError
from edgefl.methods import fedopt
from edgefl.methods.mmic import portfolio
from edgefl.registry import method

torch.set_num_threads(1)
ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "oracles.json").read_text())
CASES = {case["id"]: case for case in ORACLES["cases"]}
NEAR = ORACLES["tolerance"]


# Portfolio


def portfolio_beta(*arguments, **options) -> tuple[float, dict]:
    """beta* of the round, and what the record says beside it."""
    changed, record = portfolio.portfolio(*arguments, **options)
    told = dict(record["momentum"])
    assert changed == {"beta": told.pop("beta")} == {"beta": record["momentum"]["beta"]}
    return changed["beta"], told


def test_oracle_portfolio_1_the_running_covariance():
    case = CASES["portfolio-1"]
    got = portfolio.covariance(np.array(case["inputs"]["returns"]).T)
    np.testing.assert_allclose(got, case["expect"], atol=NEAR)


def test_the_covariance_of_many_rounds_is_numpys():
    """The running mean settles, so on a long series it is numpy.cov but for its first rounds."""
    rng = np.random.default_rng(0)
    returns = rng.normal(size=(20000, 3)) @ rng.normal(size=(3, 3))
    got = portfolio.covariance(returns)
    np.testing.assert_allclose(got, np.cov(returns.T), atol=0.03 * np.abs(got).max())
    np.testing.assert_allclose(got, got.T)
    assert np.linalg.eigvalsh(got).min() >= 0


@pytest.mark.parametrize("rounds", [0, 1])
def test_fewer_than_two_rounds_have_no_covariance(rounds):
    np.testing.assert_array_equal(portfolio.covariance(np.ones((rounds, 2))), np.zeros((2, 2)))


def test_two_rounds_have_a_covariance_and_come_in_order():
    """(0.1 - 0)^2 + (0.4 - 0.1)^2 = 0.1 over T - 1 = 1; backwards it would be 0.16 + 0.09."""
    assert portfolio.covariance(np.array([[0.1], [0.4]])) == pytest.approx(0.1)
    memory = Memory(rounds=8, devices={"a": Track(returns={8: 0.4, 1: 0.1})})
    _, told = portfolio_beta(memory, {"a": 0}, {"a": 1}, beta=0.9, risk=0.5, temperature=10)
    assert told["clusters"]["0"]["risk"] == pytest.approx(0.1)


def test_momentum_by_hand_and_within_its_bounds():
    """0.9 + tanh(0.5) / 20 = 0.9 + 0.4621171573 / 20."""
    assert portfolio.portfolio_momentum(0.9, 0.5, 20) == pytest.approx(0.9231058579)
    assert portfolio.portfolio_momentum(0.9, -0.5, 20) == 0.9
    assert portfolio.portfolio_momentum(0.9, 0.0, 10) == 0.9
    assert portfolio.portfolio_momentum(0.9, 1e9, 10) == 1.0
    assert portfolio.portfolio_momentum(0.9 + 5e-13, 1e9, 10) == 1.0  # what rounding may put above 1 is cut
    for beta, temperature in ((0.9, 9.9), (0.5, -1), (0.5, 0), (-0.1, 10)):
        with pytest.raises(ModelError, match="at most 1"):
            portfolio.portfolio_momentum(beta, 0.0, temperature)


TWO_CLUSTERS = Memory(
    rounds=4,
    devices={
        "a": Track(returns={1: 0.1, 2: 0.3, 3: 0.2, 4: 0.4}),
        "b": Track(returns={0: 7.0, 1: 0.2, 2: 0.1, 3: 0.4, 4: 0.3}),
        "c": Track(returns={4: -0.5}),
        "d": Track(returns={3: 5.0}),
    },
)


def test_portfolio_beta_by_hand():
    """Cluster 0: w = 1/4, 3/4, the covariances of portfolio-1 over rounds 1 to 4 (b's round 0 is not common):
    sigma = 0.03/16 + 2 x 3/16 x 0.00444444 + 9/16 x 0.03898148 = 0.02546875, A = 0.325.
    Cluster 1: one common round, sigma 0, A = -0.5. gamma_0 = 0.5 sigma - 0.1625, gamma_1 = 0.25; w_m = 4/6, 2/6.
    gamma = -0.09984375 + 0.08333333 < 0 at lambda 0.5: beta. At lambda 1: 2/3 sigma = 0.01697917.
    """
    participants, weights = {"a": 0, "b": 0, "c": 1, "d": 2, "e": 2, "f": 1}, {"a": 1, "b": 3, "c": 2, "d": 9, "e": 9}
    beta, told = portfolio_beta(TWO_CLUSTERS, participants, weights, beta=0.9, risk=0.5, temperature=10)
    assert beta == 0.9
    assert told["gamma"] == pytest.approx(-0.09984375 + 0.25 / 3)
    assert told["clusters"]["0"] == {
        "weight": pytest.approx(4 / 6),
        "return": pytest.approx(0.325),
        "risk": pytest.approx(0.02546875),
        "gamma": pytest.approx(0.5 * 0.02546875 - 0.1625),
        "rounds": 4,
        "devices": ["a", "b"],
    }
    assert told["clusters"]["1"]["risk"] == 0
    assert (told["clusters"]["1"]["weight"], told["clusters"]["1"]["rounds"]) == (pytest.approx(2 / 6), 1)
    none = "it has no return of this round"
    assert told["left_out"] == {"d": none, "e": none, "f": "it has no weight"}
    assert json.loads(json.dumps(told)) == told
    upside_down = {"a": 5, "b": 5, "c": 1}
    _, told = portfolio_beta(TWO_CLUSTERS, upside_down, weights, beta=0.9, risk=0.5, temperature=10)
    assert list(told["clusters"]) == ["1", "5"]

    beta, told = portfolio_beta(TWO_CLUSTERS, participants, weights, beta=0.9, risk=1.0, temperature=10)
    assert told["gamma"] == pytest.approx(0.02546875 * 2 / 3)
    assert beta == pytest.approx(0.9 + math.tanh(0.02546875 * 2 / 3) / 10)


def test_the_scale_of_the_weights_and_the_order_of_devices_do_not_matter():
    def beta(order, scale):
        weights = {name: scale * w for name, w in zip("abc", (1, 3, 2), strict=True)}
        clusters = {name: {"a": 0, "b": 0, "c": 1}[name] for name in order}
        return portfolio_beta(TWO_CLUSTERS, clusters, weights, beta=0.9, risk=1.0, temperature=10)

    assert beta("abc", 1) == beta("cba", 1)
    assert beta("abc", 1)[0] == pytest.approx(beta("abc", 100)[0])


def test_without_any_return_momentum_stays_as_it_is():
    beta, told = portfolio_beta(Memory(), {"a": 0}, {"a": 1}, beta=0.8, risk=0.5, temperature=10)
    assert (beta, told["gamma"], told["clusters"]) == (0.8, 0.0, {})


# Optimisers

STEPS = {
    "momentum": fedopt.momentum,
    "fedadagrad": fedopt.fedadagrad,
    "fedadam": fedopt.fedadam,
    "fedyogi": fedopt.fedyogi,
}


def one(value: float) -> dict[str, np.ndarray]:
    return {"w": np.array([value], np.float32)}


def walk(method, deltas, state=None, **options) -> tuple[list[float], dict[str, np.ndarray]]:
    """Where a parameter that starts at 0 is after each step, when the devices move it by ``deltas``; the last state."""
    at, path = one(0.0), []
    for step, delta in enumerate(deltas):
        now = {name: value[step] if isinstance(value, list) else value for name, value in options.items()}
        at, state = method(state, at, {"w": at["w"] + np.float32(delta)}, **now)
        path.append(float(at["w"][0]))
    return path, state


def test_oracle_fedadagrad_1():
    case = CASES["fedadagrad-1"]["inputs"]
    path, state = walk(fedopt.fedadagrad, case["deltas"], lr=case["lr"], epsilon=case["eps"], beta=case["betas"])
    assert path == pytest.approx(CASES["fedadagrad-1"]["expect"], abs=NEAR)
    assert state["momentum.w"][0] == pytest.approx(0.95 * 0.1 + 0.05 * -0.5)
    assert state["second.w"][0] == pytest.approx(1.25)


def test_momentum_by_hand_two_steps():
    """v = 1, at 0 + 2 x 1 = 2; v = 0.5 x 1 + 1 = 1.5, at 2 + 2 x 1.5 = 5."""
    path, state = walk(fedopt.momentum, [1, 1], lr=2.0, beta=0.5)
    assert path == [2.0, 5.0]
    assert {name: value.tolist() for name, value in state.items()} == {"momentum.w": [1.5]}


def test_fedadam_by_hand_two_steps():
    """u = 0.99e-6 + 0.01 = 0.01000099, m = 0.1; u = 0.0099009801 + 0.0025 = 0.0124009801, m = 0.09 - 0.05 = 0.04."""
    path, state = walk(fedopt.fedadam, [1, -0.5], lr=0.1, beta=0.9, beta2=0.99, epsilon=1e-3)
    first = 0.1 * 0.1 / (math.sqrt(0.01000099) + 1e-3)
    assert path == pytest.approx([first, first + 0.1 * 0.04 / (math.sqrt(0.0124009801) + 1e-3)], abs=NEAR)
    assert state["second.w"][0] == pytest.approx(0.0124009801)


def test_fedyogi_by_hand_two_steps():
    """u = 1e-6 + 0.01 x 1, as D^2 = 1 is above it; then u = 0.010001 - 0.01 x 0.0001 = 0.01, as D^2 is below."""
    path, state = walk(fedopt.fedyogi, [1, 0.01], lr=0.1, beta=0.9, beta2=0.99, epsilon=1e-3)
    first = 0.1 * 0.1 / (math.sqrt(0.010001) + 1e-3)
    assert path == pytest.approx([first, first + 0.1 * 0.091 / (0.1 + 1e-3)], abs=NEAR)
    assert state["second.w"][0] == pytest.approx(0.01)


def test_the_defaults():
    def defaults(method):
        return {name: p.default for name, p in inspect.signature(method).parameters.items() if p.default is not p.empty}

    adaptive = {"lr": 0.05, "beta": 0.9, "epsilon": 1e-3}
    assert defaults(fedopt.momentum) == {"lr": 1.0, "beta": 0.9}
    assert defaults(fedopt.fedadagrad) == adaptive
    assert fedopt.Rates._field_defaults == adaptive
    assert defaults(fedopt.fedadam) == defaults(fedopt.fedyogi) == {"beta2": 0.99}
    for name in ("fedadam", "fedyogi"):
        told = {option: spec.default for option, spec in method("optimise", name).options.items()}
        assert told == {**adaptive, "beta2": 0.99}
    assert defaults(portfolio.portfolio) == {"beta": 0.9, "risk": 0.5, "temperature": 10.0, "unit": "fraction"}


DELTAS = [0.3, -0.2, 0.05, 0.4, -0.7]


@pytest.mark.parametrize(
    ("method", "options", "state", "reference"),
    [
        (fedopt.momentum, {"lr": 0.3, "beta": 0.8}, None, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        (
            fedopt.fedadagrad,
            {"lr": 0.3, "beta": 0.0, "epsilon": 1e-3},
            None,
            lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-3),
        ),
        (
            fedopt.fedadam,
            {"lr": 0.3, "beta": 0.0, "beta2": 0.9, "epsilon": 1e-3},
            {"second.w": np.zeros(1, np.float32)},
            lambda p: torch.optim.RMSprop(p, lr=0.3, alpha=0.9, eps=1e-3),
        ),
    ],
)
def test_torchs_optimisers_go_the_same_way_when_the_gradient_is_minus_the_change(method, options, state, reference):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser, path = reference([parameter]), []
    for delta in DELTAS:
        parameter.grad = torch.tensor([-delta])
        optimiser.step()
        path.append(float(parameter.detach()[0]))
    assert walk(method, DELTAS, state, **options)[0] == pytest.approx(path, abs=NEAR)


def test_at_beta_0_and_lr_1_momentum_is_federated_averaging():
    assert walk(fedopt.momentum, DELTAS, lr=1.0, beta=0.0)[0] == pytest.approx(np.cumsum(DELTAS), abs=NEAR)
    previous, combined = one(0.0), one(3.0)
    following, state = fedopt.plain(None, previous, combined)
    assert (following, state) == (combined, None)
    assert following is not combined


@pytest.mark.parametrize("name", STEPS)
def test_buffers_are_copied_and_inputs_left_as_they_are(name):
    def part(value):
        return {
            "norm.weight": np.full(2, value, np.float16),
            "norm.running_mean": np.full(2, value, np.float32),
            "norm.running_var": np.full(2, value, np.float32),
            "norm.num_batches_tracked": np.array(value, np.float32),
            "scale": np.array(value, np.float32),
            "ids": np.array([value, 7], np.int64),
            "mask": np.array([value > 3, True]),
        }

    previous, combined = part(1), part(5)
    following, state = STEPS[name](None, previous, combined, lr=0.5)
    for buffer in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "ids", "mask"):
        np.testing.assert_array_equal(following[buffer], combined[buffer])
    assert {key.partition(".")[2] for key in state} == {"norm.weight", "scale"}
    assert all(value.dtype == np.float32 for value in state.values())
    assert following["norm.weight"].dtype == following["scale"].dtype == np.float32
    assert following["scale"].shape == ()
    assert following["scale"] != 5
    kept = {key: value.copy() for key, value in state.items()}
    STEPS[name](state, previous, combined, beta=np.float64(0.5))
    for got, had in ((previous, part(1)), (combined, part(5)), (state, kept)):
        for key, value in had.items():
            np.testing.assert_array_equal(got[key], value)


@pytest.mark.parametrize("name", STEPS)
def test_no_change_is_no_step_and_a_tensor_steps_alone(name):
    following, state = STEPS[name](None, one(2.0), one(2.0))
    assert following["w"].tolist() == [2.0]
    assert state["momentum.w"].tolist() == [0.0]
    both, later = STEPS[name](
        state, {**one(2.0), "new": np.ones(3, np.float32)}, {**one(2.5), "new": np.zeros(3, np.float32)}
    )
    alone, _ = STEPS[name](state, one(2.0), one(2.5))
    assert both["w"] == alone["w"]
    fresh, _ = STEPS[name](None, {"new": np.ones(3, np.float32)}, {"new": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(both["new"], fresh["new"])
    assert both["w"] > 2
    assert (both["new"] < 1).all()
    assert list(both) == ["w", "new"]
    assert list(later) == sorted(later, key=lambda key: (key.partition(".")[2], key))
    assert later.keys() - state.keys() == {key.replace(".w", ".new") for key in state}


@pytest.mark.parametrize("name", STEPS)
def test_what_does_not_fit_is_named(name):
    with pytest.raises(ModelError, match=r"'w' is \[1\], the server holds nothing"):
        STEPS[name](None, {}, one(1.0))
    with pytest.raises(ModelError, match=r"'w' is \[1\], the server holds \[2\]"):
        STEPS[name](None, {"w": np.zeros(2, np.float32)}, one(1.0))
    with pytest.raises(ModelError, match=r"'momentum.w' is \[2\], the tensor is \[1\]"):
        STEPS[name]({"momentum.w": np.zeros(2, np.float32)}, one(0.0), one(1.0))


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_an_epsilon_of_0_is_refused_before_it_divides_by_0(name):
    with pytest.raises(ModelError, match="epsilon 0"):
        STEPS[name](None, one(0.0), one(0.0), epsilon=0.0)

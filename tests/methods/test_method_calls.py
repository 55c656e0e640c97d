"""A method that the core would not call, or cannot, is refused by name when it registers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share, state_of

from edgefl import registry
from edgefl.aggregation.mean import WeightedMean
from edgefl.config.profiles import load_run
from edgefl.errors import ConfigError
from edgefl.method_calls import CALLS, misfit
from edgefl.registry import Option, Signature
from edgefl.roles import ROLES, Cluster, Combine, Objective, Sharing, StandIn
from edgefl.training.fill import AtHand

OPTION = {"strength": Option(2.0, "a factor", least=0)}
#: role -> what a method of it has besides the function that is tried.
BESIDE: dict[str, dict[str, Any]] = {
    "cluster": {
        "signature": Signature("s", lambda d, c, s: {}, lambda c: {}, lambda t: None),
        "group": lambda signatures, generator: {},
    },
    "missing": {"make": lambda modality, given: None, "completed_counts": lambda samples, encoders: samples},
    "prototypes": {"rows": lambda model: {}, "local_rows": lambda job, candidate, own: {}},
    "repair": {"ask": lambda members: {}, "lend": lambda updates, needs, store, clusters: ({}, {})},
    "objective": {"loss": lambda forward: None},
    "pace": {"fewest": lambda: 1},
    "upload": {"send": lambda trained, generator: (trained.parts, {})},
    "weight": {"weigh": lambda samples, modalities: samples},
    "combine": {
        "accumulate": lambda layout: None,
        "merge": lambda loaders, layout: ({}, {}),
        "screen": lambda changes: ({}, {}),
        "per_round": True,
        "noise": lambda: None,
        "account": lambda spent, uploads: None,
    },
    "optimise": {"step": lambda state, previous, combined: (combined, None)},
}
FUNCTIONS = [(role, name, len(given.split())) for role, calls in CALLS.items() for name, given in calls.items()]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ROLES:
        monkeypatch.setitem(registry._methods, role, dict(registry.methods(role)))


def taking(n: int, *, more: str = "") -> Callable[..., object]:
    """A function of ``n`` positional parameters, and of what ``more`` says."""
    names = ", ".join([*(f"p{i}" for i in range(n)), *([more] if more else [])])
    return eval(f"lambda {names}: None")  # noqa: S307


def made(role: str, function: str, value: object) -> Any:
    return ROLES[role].kind("mine", "a test's", OPTION, **{**BESIDE.get(role, {}), function: value})


@pytest.mark.parametrize("role", list(ROLES))
def test_what_ships_can_be_called(role: str) -> None:
    assert {name: why for name, one in registry.methods(role).items() if (why := misfit(role, one))} == {}
    assert registry.broken == {}


@pytest.mark.parametrize(("role", "function", "given"), FUNCTIONS)
def test_a_function_that_does_not_fit_is_refused_by_name_with_the_call(role: str, function: str, given: int) -> None:
    options = [] if function in ("make", "offered") else ["*", "strength"]
    call = rf"make it {function}\({', '.join([*CALLS[role][function].split(), *options])}".replace("*", r"\*")
    fewer = [taking(given - 1)] if given else []
    for value in (*fewer, taking(given + 1), taking(given, more="*, other"), "no function"):
        with pytest.raises(
            ValueError, match=rf"{role}: mine has a function {function} that cannot be called: .*{call}"
        ):
            registry.register(made(role, function, value))
        assert "mine" not in registry.methods(role)


@pytest.mark.parametrize(("role", "function", "given"), FUNCTIONS)
def test_a_function_takes_its_options_by_name_or_leaves_them(role: str, function: str, given: int) -> None:
    more = [""] if function in ("make", "offered") else ["", "*, strength", "strength=1.0", "**options"]
    for value in (taking(given, more=one) for one in more):
        assert misfit(role, made(role, function, value)) == ""


def test_an_option_named_as_what_is_passed_is_refused() -> None:
    method = Objective("mine", "a test's", {"forward": OPTION["strength"]}, loss=lambda forward: None)
    with pytest.raises(
        ValueError, match=r"objective: mine has a function loss .*multiple values for argument 'forward'"
    ):
        registry.register(method)


@pytest.mark.parametrize("role", ["schedule", "fusion", "select", "objective", "weight", "combine", "optimise"])
def test_a_method_without_the_function_of_its_role_is_refused(role: str) -> None:
    with pytest.raises(ValueError, match=f"{role}: mine has no function .*give it one"):
        registry.register(ROLES[role].kind("mine", "a test's"))


@pytest.mark.parametrize(
    ("role", "fields", "why"),
    [
        ("cluster", {"group": taking(2)}, "has group without signature"),
        ("cluster", {"signature": BESIDE["cluster"]["signature"]}, "has signature without group"),
        ("prototypes", {"local": taking(5)}, "has local without rows and local_rows"),
        ("missing", {"make": taking(2), "completed_data": taking(2)}, "has completed_data without completed_counts"),
    ],
)
def test_what_is_not_called_without_another_is_refused(role: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"{role}: mine {why}"):
        registry.register(ROLES[role].kind("mine", "a test's", **fields))


@pytest.mark.parametrize("name", ["sign", "layout", "check"])
def test_a_signature_that_does_not_fit_is_refused(name: str) -> None:
    signature = BESIDE["cluster"]["signature"]._replace(**{name: taking(4)})
    with pytest.raises(ValueError, match=rf"cluster: mine has a function signature\.{name} that cannot be called"):
        registry.register(Cluster("mine", "a test's", signature=signature, group=taking(2)))


def test_a_role_that_calls_nothing_takes_nothing_from_outside() -> None:
    """It trained as separate encoders, which the core builds for what it does not know."""
    with pytest.raises(ValueError, match=r"sharing: half would never be called: .*choose one of "):
        registry.register(Sharing("half", "every second layer"))


def test_a_run_that_asks_for_what_was_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value, dist = "half", "outside:module", None

        def load(self) -> None:
            registry.register(Sharing("half", "every second layer"))

    monkeypatch.setattr(registry, "broken", {})
    monkeypatch.setattr(registry, "_begun", False)
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    with pytest.raises(ConfigError) as caught:
        load_run("demo", ["slots.sharing=half"])
    assert "outside:module" in str(caught.value)
    assert "sharing: half would never be called" in str(caught.value)


def test_a_combine_gets_its_options(tmp_path: Path) -> None:
    """Updates times ``strength``: a run of strength 0 has zeros for a model, where it ended in a TypeError."""

    class Scaled(WeightedMean):
        def __init__(self, layout: Any, *, strength: float) -> None:
            super().__init__(layout)
            self.strength = strength

        def result(self) -> dict[str, np.ndarray]:
            return {name: (value * self.strength).astype(value.dtype) for name, value in super().result().items()}

    registry.register(Combine("scaled", "a test's", OPTION, accumulate=Scaled))
    plan = plan_of(tmp_path, "end_to_end", "ab", 2, ["training.rounds=[0,1]", "slots.combine={scaled: {strength: 0}}"])
    own = {name: share(24, {"a": 1.0, "b": 1.0}, seed) for seed, name in enumerate("xy")}
    assert run_fleet(tmp_path, plan, own).status == "done"
    store, state = state_of(tmp_path)
    assert not np.frombuffer(store.read(state["task"].id)[-16:], np.float32).any()


def test_a_method_of_no_role_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fills no role; make it a kind of edgefl\.roles"):
        registry.register(registry.Method("mine", "a test's"))


def test_a_stand_in_finds_its_options_in_what_is_at_hand() -> None:
    assert "options" in AtHand.__dataclass_fields__
    with pytest.raises(ValueError, match="missing: mine has a function make"):
        registry.register(StandIn("mine", "a test's", OPTION, make=lambda modality, given, *, strength: None))


def test_a_function_without_parameters_is_given_no_option():
    choice = registry.Choice(Cluster("mine", "a test's"), {"strength": 2.0})
    assert choice.bind(lambda: 3)() == 3
    assert choice.bind(lambda **options: options)() == {"strength": 2.0}

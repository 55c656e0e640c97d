"""Methods by role and name: what the slots of a recipe can be filled with.

A method registers itself when its module is imported: every module of ``edgefl.methods``, and each entry point of the
group ``edgefl.methods`` of other installed packages. Only names travel between coordinator and devices, never code.
The rest of the product knows roles and what a method declares of itself (its traits), never a method's name.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from edgefl.errors import ConfigError, Problem, ProtocolError
from edgefl.method_calls import CALLS, misfit

if TYPE_CHECKING:
    from typing import Concatenate

    from edgefl.data.arrays import Array
    from edgefl.data.dataset import Dataset

R = TypeVar("R")

GROUP = "edgefl.methods"
#: What fills one slot: {method: options}.
Slot = Mapping[str, Mapping[str, float | str]]
#: A recipe: role -> slot.
Recipe = Mapping[str, Slot]


class Option(NamedTuple):
    """One option: text is one of ``choices`` (none: any text), a number lies in ``least`` … ``most``.

    A method's functions take its options as keyword arguments, numbers as floats, a count (``default`` an int) too.
    """

    default: float | str
    doc: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf


#: Options that several methods have.
TERM_WEIGHT = Option(1.0, "factor of the term", least=0)
MIN_COUNT = Option(  # a mean of few samples tells which these are: of two, 84 to 90 % of the time, of five, 63 to 70
    5, "fewest samples of a class on a device whose mean it sends; fewer would give them away", least=1
)
DEVICE_SHARE = Option(0.5, "share of the eligible devices, rounded up", least=1e-7, most=1)


class Rule(NamedTuple):
    """A method's requirement of a recipe: a choice with ``trait`` in ``role``; with ``wanted`` False an exclusion.

    ``text``: what is wrong with a recipe that breaks it, and the way out.
    """

    role: str
    trait: str
    text: str
    wanted: bool = True


@dataclass(frozen=True)
class Method:
    """Declaration that all methods share: name, one sentence, options, and what it does not mix with.

    ``default``: it fills a slot that a recipe leaves out.
    ``rules``: what a recipe with it needs and excludes; ``conflicts``: the same by a function, where that is no trait.
    ``per_round``: it makes something of all devices of one round together: no updates of earlier rounds.
    ``partial``: it leaves devices out of a round: no asynchronous rounds.
    ``blind``: it does so by their names and clusters alone, also of devices that are not known yet.
    ``headless``: why it has no meaning for a model without projection heads.
    ``shape``: (encoders by modality, options) -> the fields of the model's specification that it decides.
    ``returns``: it goes by the devices' returns, for which each sets samples apart (``training.holdout``).
    ``moves``: with it the global weights are not the mean of the devices' models.
    """

    role: ClassVar[str] = ""

    name: str
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    default: bool = False
    rules: tuple[Rule, ...] = ()
    conflicts: Callable[[Recipe], list[Problem]] | None = None
    per_round: bool = False
    partial: bool = False
    blind: bool = False
    headless: str = ""
    shape: Callable[Concatenate[Mapping[str, Any], ...], Mapping[str, object]] | None = None
    returns: bool = False
    moves: bool = False

    def has(self, trait: str) -> bool:
        """Whether it has a trait, such as ``returns``."""
        return bool(getattr(self, trait))

    def problems(self, role: str, recipe: Recipe) -> list[Problem]:
        """The rules that a recipe with this method in ``role`` breaks, each with the way out."""
        found = [Problem(role, r.text) for r in self.rules if offers(recipe, r.role, r.trait) != r.wanted]
        return found + (self.conflicts(recipe) if self.conflicts else [])


class Verdict(NamedTuple):
    """Judgement of a stage so far. ``best``: after how many of its rounds the model was best; ``over``: it ends."""

    best: int
    over: bool


class Signature(NamedTuple):
    """Summary of its data that each device sends once, for clustering the devices; ``name``: how a job asks for it.

    With its first update, or ``joining``, with its hello: then at most ``protocol.messages.MAX_SIGNATURE_BYTES``.
    ``sign``: (dataset, classes, seed of the run) -> its tensors. ``layout``: (samples of each class) -> tensor name ->
    (safetensors' type, shape). ``check`` raises ProtocolError unless tensors are what ``sign`` makes.
    """

    name: str
    sign: Callable[[Dataset, int, int], dict[str, Array]]
    layout: Callable[[Sequence[int]], dict[str, tuple[str, tuple[int, ...]]]]
    check: Callable[[Mapping[str, Array]], None]
    joining: bool = False


class Period(NamedTuple):
    """Period: ``rounds`` from one whole exchange to the next, and most ``layers`` of a device in those between."""

    rounds: int = 1
    layers: int = 0


class Member(NamedTuple):
    """Member of a period, in a round that exchanges layers. Layers are named "part|tensor".

    ``layer``, ``change``: its layer to repair by its last update, and how much that changed; "", 0: none.
    ``parts``: those it trains; ``largest``: the largest layer it may be asked for in a stage's first round, later "".
    ``cluster`` -1: none is known.
    """

    cluster: int
    layer: str
    change: float
    parts: tuple[str, ...]
    largest: str


class Observed(NamedTuple):
    """A device's training as a repair sees it. ``complete``: the device may lend to others.

    ``poverty``: the layer to repair, as its place among the sorted weight tensors of the parts that are sent; -1: none
    of these. ``poverty_change``: how much it changed; 0: there is none. ``layer``: in a period its name, "part|tensor".
    """

    complete: bool = True
    poverty: int = -1
    poverty_change: float = 0.0
    layer: str = ""


class Observer(Protocol):
    """Observer of a device's training for a repair; batches are complete or not, never mixed, while it does."""

    @property
    def copied(self) -> Sequence[Any]:
        """Parameters of which its step holds copies."""

    def step(self, optimizer: Any, complete: bool) -> AbstractContextManager[None]:
        """Around one step on a batch that is complete or not."""

    def epoch(self) -> None:
        """After each epoch."""

    def observed(self, sending: Mapping[str, Mapping[str, Array]]) -> Observed:
        """Its result, after the last epoch; ``sending``: the parts that are sent."""


class Trained(NamedTuple):
    """Inputs of an upload's method, which changes none of them.

    ``parts``: those that every update would have, as trained; ``received``: every part before training; ``kept``: what
    the method kept in the device's last round. ``losses``: modalities -> loss on the hold-out, given these alone; {}
    for a method that does not go by returns, or without a labelled sample that has all the device's modalities.
    """

    parts: Mapping[str, dict[str, Array]]
    received: Mapping[str, dict[str, Array]]
    losses: Mapping[frozenset[str], float]
    kept: Mapping[str, Array]


class Screening(NamedTuple):
    """Judgement of a round's changes. ``factors``: {device: factor of its change; 0: the update is left out}.

    ``options``: of the method's, as they are from the next round on.
    """

    factors: dict[str, float]
    record: dict[str, object]
    options: Mapping[str, float] = {}


class Account(NamedTuple):
    """Account of privacy after a round. ``spent``: adds up over rounds, from 0; ``over``: no other round may follow.

    ``record``: epsilon, delta and the budget, for the round's; and ``server``, epsilon towards it, where it is not
    trusted.
    """

    spent: float
    record: dict[str, float]
    over: bool


_methods: dict[str, dict[str, Method]] = {role: {} for role in CALLS}
#: Name of an entry point -> why its package could not be loaded.
broken: dict[str, str] = {}
_loading = threading.RLock()
_begun = _loaded = False


def register(*methods: Method, built_by_core: bool = False) -> None:
    """Make methods known under their names.

    ``built_by_core``: the core itself has what they stand for. Raises ValueError for a name that its role has already,
    for a role that calls no method, and for a method that cannot be called as its role is (``edgefl.method_calls``).
    """
    for method in methods:
        role = method.role
        if not role:
            raise ValueError(f"{method!r} fills no role; make it a kind of edgefl.roles, such as Objective")
        if method.name in _methods[role]:
            raise ValueError(f"{role}: {method.name} is registered twice")
        if not CALLS[role] and not built_by_core:
            known = ", ".join(_methods[role])
            raise ValueError(
                f"{role}: {method.name} would never be called: the core builds this; choose one of {known}"
            )
        if why := misfit(role, method):
            raise ValueError(f"{role}: {method.name} {why}")
        _methods[role][method.name] = method


def methods(role: str) -> dict[str, Any]:
    """Name -> method of a role: the default first, then by name, whatever was imported first."""
    _load()
    return dict(sorted(_methods[role].items(), key=lambda item: (not item[1].default, item[0])))


def default(role: str) -> str:
    """Name of the method that fills a slot which a recipe leaves out."""
    return next(iter(methods(role)))


def method(role: str, name: str) -> Any:
    """The method of this name. Raises ConfigError that lists what is installed."""
    _load()
    if name not in _methods[role]:
        known = ", ".join(methods(role))
        raise ConfigError("recipe", [Problem(role, f"unknown method '{name}'{unloaded()}; choose one of: {known}")])
    return _methods[role][name]


def unloaded() -> str:
    """Packages whose methods could not be loaded, and why, in brackets; "": there are none."""
    _load()
    return f" ({'; '.join(broken.values())})" if broken else ""


class Choice(NamedTuple):
    """One method in a slot, and its options, defaults included."""

    method: Any  # of the role's kind
    options: dict[str, float | str]

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.method.name)

    def taken(self, function: Callable[..., object]) -> dict[str, float | str]:
        """Those of the options that a function has parameters for; all, if it takes any."""
        takes = _parameters(function)
        return {k: value for k, value in self.options.items() if takes is None or k in takes}

    def bind(self, function: Callable[..., R]) -> Callable[..., R]:
        """The function with the options that it takes as keyword arguments."""
        return partial(function, **self.taken(function))

    def flag(self, trait: str) -> bool:
        """Answer of a function of the options alone; False where the method has none."""
        function = getattr(self.method, trait)
        return bool(function and self.bind(function)())


@cache
def _parameters(function: Callable[..., object]) -> frozenset[str] | None:
    """Names of a function's parameters; None: it takes any."""
    found = inspect.signature(function).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return None if every else frozenset(found)


def chosen(role: str, slot: Slot | None) -> list[Choice]:
    """The methods in a slot; the role's default for an empty one. Raises ConfigError for unknown names and options."""
    found = []
    for name, options in (slot or {default(role): {}}).items():
        one = method(role, name)
        if options and not options.keys() <= one.options.keys():
            unknown, known = sorted(set(options) - set(one.options)), ", ".join(one.options) or "no options"
            paths = (f"{role}.{name}.{option}" for option in unknown)
            raise ConfigError("recipe", [Problem(path, f"unknown option; choose from: {known}") for path in paths])
        defaults = {key: option.default for key, option in one.options.items()}
        found.append(Choice(one, defaults | dict(options or {})))
    return found


def choose(role: str, recipe: Recipe) -> Choice:
    """The one method of a role in a recipe. Raises ConfigError for several, and for unknown names and options."""
    found = chosen(role, recipe.get(role))
    if len(found) != 1:
        names = ", ".join(sorted(one.name for one in found))
        raise ConfigError("recipe", [Problem(role, f"needs exactly one method, got {names}")])
    return found[0]


def signature(name: str) -> Signature:
    """The signature of this name, by which devices are clustered. Raises ProtocolError when no method asks for it."""
    found = _signatures()
    if name not in found:
        raise ProtocolError(
            "a signature that no device was asked for", remedy="Only a recipe with clusters takes signatures."
        )
    return found[name]


def _signatures() -> dict[str, Signature]:
    return {one.signature.name: one.signature for one in methods("cluster").values() if one.signature}


def offers(recipe: Recipe, role: str, trait: str) -> bool:
    """Whether a method that ``recipe`` has in this role has a trait, such as ``labels`` of a term of the loss."""
    return any(choice.method.has(trait) for choice in chosen(role, recipe[role]))


def not_installed(slots: Recipe, asked: str = "") -> str:
    """Which methods of these slots and of the signature ``asked`` are not installed here, in words; "": all are."""
    _load()
    lacking = [f"{role}: {name}" for role, slot in slots.items() for name in slot if name not in _methods[role]]
    unknown = [f"signature: {asked}"] if asked and asked not in _signatures() else []  # of any package's method
    why = [text for name, text in broken.items() if unknown or any(name in slot for slot in slots.values())]
    lacking += unknown
    return "; ".join([f"not installed on this device: {', '.join(lacking)}", *why]) if lacking else ""


def _load() -> None:
    """Import every module that registers methods, once."""
    global _begun, _loaded  # noqa: PLW0603 - what is installed does not change while a program runs
    if _loaded:  # a lock is taken for each message of a device else
        return
    with _loading:
        if _begun:
            return
        _begun = True
        for module in pkgutil.walk_packages(importlib.import_module(GROUP).__path__, f"{GROUP}."):
            importlib.import_module(module.name)
        for point in entry_points(group=GROUP):
            try:
                point.load()
            except Exception as error:
                package = point.dist.name if point.dist else point.value
                broken[point.name] = f"package {package} has it but does not load: {type(error).__name__}: {error}"
        _loaded = True

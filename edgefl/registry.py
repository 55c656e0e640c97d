"""Methods by role and name: what the slots of a recipe can be filled with.

A method registers itself when its module is imported: every module of ``edgefl.methods``, and each entry point of the
group ``edgefl.methods`` of other installed packages. Only names travel between coordinator and devices, never code.
The rest of the product knows roles and what a method declares of itself (its traits), never a method's name.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from edgefl.errors import ConfigError, Problem

GROUP = "edgefl.methods"
#: What fills one slot: {method: options}.
Slot = Mapping[str, Mapping[str, float | str]]
#: A recipe: role -> slot.
Recipe = Mapping[str, Slot]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a method, a field each, with its default, range and description.

    A number is ``Annotated[float, Meta(ge=…, le=…, description=…)]``, a count ``int`` instead, text
    ``Annotated[Literal[…], Meta(…)]`` or, free, ``Annotated[str, Meta(…)]``. A field whose option is a word of Python's
    gets ``msgspec.field(name=…)``.
    """


#: Options that several methods have.
TermWeight = Annotated[float, Meta(ge=0, description="factor of the term")]
Temperature = Annotated[float, Meta(ge=0.001, description="softmax temperature")]
DeviceShare = Annotated[float, Meta(ge=0.01, le=1, description="share of the eligible devices, rounded up")]


class Option(NamedTuple):
    """One option: text is one of ``choices`` (none: any text), a number lies in ``least`` … ``most``."""

    default: float | str
    doc: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf


def no_conflicts(recipe: Recipe) -> list[Problem]:
    """Of a method that mixes with every other."""
    return []


@dataclass(frozen=True)
class Method:
    """What every method declares: name, one sentence, options, source, and what it does not mix with.

    ``default``: it fills a slot that a recipe leaves out.
    ``conflicts``: the rules that a recipe with this method breaks, each with the way out.
    ``per_round``: it makes something of all devices of one round together: no updates of earlier rounds.
    ``partial``: it leaves devices out of a round: no asynchronous rounds.
    ``headless``: why it has no meaning for a model without projection heads.
    """

    name: str
    summary: str
    options: type[Options] = Options
    source: str = ""
    default: bool = False
    conflicts: Callable[[Recipe], list[Problem]] = no_conflicts
    per_round: bool = False
    partial: bool = False
    headless: str = ""

    @cached_property
    def fields(self) -> dict[str, Option]:
        """Option name -> default, description and range."""
        hints = get_type_hints(self.options, include_extras=True)
        return {
            field.encode_name: _option(hints[field.name], field.default)
            for field in msgspec.structs.fields(self.options)
        }

    def typed(self, options: Mapping[str, float | str]) -> Any:
        """The options as an instance of the method's own class; absent ones have their defaults."""
        whole = {name for name, option in self.fields.items() if isinstance(option.default, int)}
        return msgspec.convert({k: int(v) if k in whole else v for k, v in options.items()}, self.options)


class Schedule(Method):
    """Which parts exist and are trained in each stage."""


class Sharing(Method):
    """What the modalities' encoders share."""


class Fusion(Method):
    """How the modalities become one representation."""


class Cluster(Method):
    """How devices are grouped."""


class Select(Method):
    """Which of the eligible devices train a round."""


class StandIn(Method):
    """What stands in for an absent modality during training."""


class Prototypes(Method):
    """Prototypes, computed on the devices and merged."""


@dataclass(frozen=True)
class Objective(Method):
    """A term of the local loss. ``labels``, ``pairs``: it gives the model a task, learned from labels or from pairs."""

    labels: bool = False
    pairs: bool = False

    @property
    def task(self) -> bool:
        """Whether it gives the model something to learn by itself."""
        return self.labels or self.pairs


class Repair(Method):
    """What is replaced in updates before they are aggregated."""


class Weight(Method):
    """Aggregation weights of the devices."""


class Combine(Method):
    """How updates become one."""


class Optimise(Method):
    """How the aggregated update changes the global model."""


class Role(NamedTuple):
    """One slot of a recipe. ``plural``: it holds several methods at once."""

    decides: str
    kind: type[Method]
    plural: bool = False


ROLES: dict[str, Role] = {
    "schedule": Role("which parts exist and are trained in each stage", Schedule),
    "sharing": Role("what the modalities' encoders share", Sharing),
    "fusion": Role("how the modalities become one representation", Fusion),
    "cluster": Role("how devices are grouped", Cluster),
    "select": Role("who is asked in a round, among the eligible", Select),
    "missing": Role("what stands in for an absent modality during training", StandIn),
    "prototypes": Role("prototypes, computed on the devices and merged", Prototypes),
    "objective": Role("terms of the local loss, summed", Objective, plural=True),
    "repair": Role("what is replaced in uploads before they are combined", Repair),
    "weight": Role("weights of the devices", Weight),
    "combine": Role("how uploads become one", Combine),
    "optimise": Role("how the mean changes the global model", Optimise),
}

_methods: dict[str, dict[str, Method]] = {role: {} for role in ROLES}
#: Name of an entry point -> why its package could not be loaded.
broken: dict[str, str] = {}
_loading = threading.RLock()
_loaded = False


def register(*methods: Method) -> None:
    """Make methods known under their names. Raises ValueError for a name that its role has already."""
    for method in methods:
        role = next(name for name, one in ROLES.items() if one.kind is type(method))
        there = _methods[role].get(method.name)
        if there is not None and there.options.__module__ != method.options.__module__:
            raise ValueError(f"{role}: {method.name} is registered twice")
        _methods[role][method.name] = method


def methods(role: str) -> dict[str, Any]:
    """Name -> method of a role: the default first, then by name."""
    _load()
    return dict(sorted(_methods[role].items(), key=lambda item: (not item[1].default, item[0])))


def default(role: str) -> str:
    """Name of the method that fills a slot which a recipe leaves out."""
    return next(iter(methods(role)))


def method(role: str, name: str) -> Any:
    """The method of this name. Raises ConfigError that lists what is installed."""
    _load()
    if name not in _methods[role]:
        why = f" ({broken[name]})" if name in broken else ""
        known = ", ".join(methods(role))
        raise ConfigError("recipe", [Problem(role, f"unknown method '{name}'{why}; choose one of: {known}")])
    return _methods[role][name]


def chosen(role: str, slot: Slot | None) -> list[tuple[Any, Mapping[str, float | str]]]:
    """(method, options) of each choice in a slot; the role's default for an empty one."""
    filled = slot or {default(role): {}}
    return [(method(role, name), options) for name, options in filled.items()]


def one(role: str, slot: Slot | None) -> tuple[Any, Mapping[str, float | str]]:
    """(method, options) of a slot that holds one method. Raises ConfigError for several."""
    found = chosen(role, slot)
    if len(found) != 1:
        names = ", ".join(sorted(one.name for one, _ in found))
        raise ConfigError("recipe", [Problem(role, f"needs exactly one method, got {names}")])
    return found[0]


def _load() -> None:
    """Import every module that registers methods, once."""
    global _loaded  # noqa: PLW0603 - what is installed does not change while a program runs
    with _loading:
        if _loaded:
            return
        _loaded = True
        for name in _modules():
            importlib.import_module(name)
        for point in entry_points(group=GROUP):
            try:
                point.load()
            except Exception as error:
                package = point.dist.name if point.dist else point.value
                broken[point.name] = f"package {package} has it but does not load: {type(error).__name__}: {error}"


def _modules() -> Iterator[str]:
    package = importlib.import_module(GROUP)
    for module in pkgutil.walk_packages(package.__path__, f"{GROUP}."):
        if module.name not in _WITH_TORCH:
            yield module.name


#: Modules that load torch when they are imported, and register nothing.
_WITH_TORCH = frozenset(
    {
        "edgefl.methods.absent.stand_ins",
        "edgefl.methods.objectives.clip",
        "edgefl.methods.objectives.cluster_contrast",
        "edgefl.methods.objectives.gmc",
        "edgefl.methods.objectives.margin",
        "edgefl.methods.objectives.mcm",
        "edgefl.methods.objectives.model_transfer",
        "edgefl.methods.objectives.prototype_contrast",
        "edgefl.methods.objectives.prototype_transfer",
        "edgefl.methods.objectives.proximal",
        "edgefl.methods.objectives.ram",
        "edgefl.methods.objectives.reconstruction",
        "edgefl.methods.objectives.shared",
        "edgefl.methods.prototypes.matcher_networks",
        "edgefl.methods.repair.poverty_layer",
    }
)


def _option(hint: Any, default: float | str) -> Option:
    """From an option's annotation, ``Annotated[type, Meta(…)]``."""
    kind, meta = get_args(hint)
    least = -math.inf if meta.ge is None else float(meta.ge)
    most = math.inf if meta.le is None else float(meta.le)
    choices = tuple(get_args(kind)) if get_origin(kind) is Literal else ()
    return Option(default, meta.description or "", choices, least, most)

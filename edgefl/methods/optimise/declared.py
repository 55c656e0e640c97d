"""Server optimisers: their options and rules."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgefl.errors import Problem
from edgefl.registry import Optimise, Options, Recipe, register

Rate = Annotated[float, Meta(ge=0, description="the server's learning rate")]
Beta = Annotated[float, Meta(ge=0, le=0.999, description="share of the momentum kept from round to round")]


class Momentum(Options, frozen=True):
    """Options of server momentum."""

    lr: Rate = 1.0
    beta: Beta = 0.9


class Adagrad(Options, frozen=True):
    """Options of an adaptive step."""

    lr: Rate = 0.05
    beta: Beta = 0.9
    epsilon: Annotated[float, Meta(ge=1e-12, description="added to the root of the second moment")] = 1e-3


class Adam(Adagrad, frozen=True):
    """Options of an adaptive step whose second moment fades."""

    beta2: Annotated[float, Meta(ge=0, le=1, description="share of the second moment kept")] = 0.99


class Portfolio(Adagrad, frozen=True):
    """Options of Adagrad with portfolio momentum."""

    risk: Annotated[float, Meta(ge=0, le=1, description="weight of risk against return")] = 0.5
    temperature: Annotated[
        float, Meta(ge=1, description="what the correction is divided by; beta + 1/temperature is at most 1")
    ] = 10.0


def _bounded(recipe: Recipe) -> list[Problem]:
    options = recipe["optimise"]["fedadagrad_mpo"]
    if float(options["beta"]) + 1 / float(options["temperature"]) > 1:
        return [Problem("optimise", "beta + 1/temperature of fedadagrad_mpo exceeds 1; raise temperature")]
    return []


register(
    Optimise("plain", "it replaces it", default=True),
    Optimise("momentum", "server momentum (FedAvgM, arXiv 1909.06335)", Momentum),
    Optimise("fedadagrad", "adaptive (arXiv 2003.00295)", Adagrad),
    Optimise("fedadam", "adaptive (arXiv 2003.00295)", Adam),
    Optimise("fedyogi", "adaptive (arXiv 2003.00295)", Adam),
    Optimise(
        "fedadagrad_mpo",
        "Adagrad whose momentum follows the risk of the groups' returns (MMiC, eqs 19-22)",
        Portfolio,
        conflicts=_bounded,
        per_round=True,
    ),
)

"""Settings of the prototype mask: by which score an absent modality's class is guessed, among how many, how sharply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgefl.errors import ModelError

#: Classes mixed and softmax temperature over cosines, in training, evaluation and exported bundles alike. So sharp that
#: only near ties are mixed: an even mixture of classes is what zeros already say (docs/decisions/0005).
TOP_K = 3
TEMPERATURE = 0.01
#: Each metric's own temperature. The paper names none, which is 1: the softmax of -distances and of a prior's cosines
#: as they are, and a classifier's probabilities themselves (docs/decisions/0031). Cosines with a modality's own
#: prototypes at 0.05 and 0.2 serve the weaker sensor worse than at 0.01 (measured, docs/decisions/0005).
TEMPERATURES = {"cosine": TEMPERATURE, "l1": 1.0, "l2": 1.0, "classifier": 1.0, "prior": 1.0}
#: The metrics whose scores small trained networks give.
TRAINED_METRICS = ("classifier", "prior")


@dataclass(frozen=True)
class Matcher:
    """How an absent modality's class is guessed.

    ``metric``: the score of a class; ``k``: how many of the best are mixed; ``temperature`` divides the scores, or a
    classifier's logarithms, before the softmax; 0 becomes the metric's own (``TEMPERATURES``). Raises ModelError for an
    unknown metric and for settings out of range.
    """

    metric: Literal["cosine", "l1", "l2", "classifier", "prior"] = "cosine"
    k: int = TOP_K
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.metric not in TEMPERATURES:
            raise ModelError(f"unknown metric {self.metric!r}", remedy=f"Choose one of: {', '.join(TEMPERATURES)}.")
        if self.k < 1 or self.temperature < 0:
            raise ModelError(f"a matcher needs k >= 1 and temperature >= 0, got {self.k} and {self.temperature}")
        if self.temperature == 0:
            object.__setattr__(self, "temperature", TEMPERATURES[self.metric])

    @property
    def trained(self) -> bool:
        """Whether small networks give the scores."""
        return self.metric in TRAINED_METRICS


DEFAULT_MATCHER = Matcher()

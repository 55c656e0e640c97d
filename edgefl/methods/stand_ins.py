"""Stand-ins for an absent modality's projection that need nothing else.

zero: 0.  random: N(0, 1).  ignore leaves incomplete samples out before batches are made.

``drop`` hides one modality of a complete sample from the fusion with that probability, so that every device learns to
do without (modality dropout: Neverova et al., ModDrop, arXiv 1501.00102; ``edgefl.training.fill`` has it).
"""

from __future__ import annotations

from edgefl.lazy import torch
from edgefl.registry import Option, register
from edgefl.roles import StandIn
from edgefl.training.fill import AtHand, Made


def zero(modality: str, given: AtHand) -> Made:
    """Zeros."""
    return Made(given.zeros(), given.rows(False))


def random(modality: str, given: AtHand) -> Made:
    """Standard normal noise."""
    return Made(torch.randn_like(given.zeros()), given.rows(True))


DROP = {
    "drop": Option(0.0, "probability that a complete sample trains with one of its modalities hidden", least=0, most=1)
}
register(
    StandIn("zero", "zeros", DROP, default=True, make=zero, offered=lambda model, tables: True),
    StandIn("ignore", "samples that lack a modality are left out", make=zero, complete_only=True),
    StandIn("random", "standard normal noise", DROP, make=random),
)

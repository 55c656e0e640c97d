"""Own training code: a function of yours as the trainer of a device (docs/own_training.md)."""

from edgefl.client.round import Round, Trained
from edgefl.client.save import save

__all__ = ["Round", "Trained", "save"]

"""Own training code: a function of yours as the trainer of a device (docs/own_training.md)."""

from edgefl.client.round import Round, TrainedParts
from edgefl.client.save import load, save

__all__ = ["Round", "TrainedParts", "load", "save"]

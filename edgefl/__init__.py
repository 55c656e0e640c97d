"""EdgeFL: train multimodal models across small devices inside each device's real budget, and see what it cost."""

__version__ = "0.1.0"

"""A simulated fleet beside Flower's simulation."""

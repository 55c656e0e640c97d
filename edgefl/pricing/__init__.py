"""Prices of a round on the meta device: the training code itself, traced without data."""

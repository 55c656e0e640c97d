"""Predicted cost of a stage, and what of it fits a device budget."""

"""Predicted cost of a stage, and its placement within a device's budget."""

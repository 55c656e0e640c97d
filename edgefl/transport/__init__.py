"""Moves bytes."""

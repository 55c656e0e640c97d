"""Moves bytes between devices and coordinator; knows nothing of what they mean."""

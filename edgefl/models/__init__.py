"""Staged encoders, heads and fusion."""

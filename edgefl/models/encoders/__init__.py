"""Encoder kinds, one file each."""

"""Samples with absent modalities."""

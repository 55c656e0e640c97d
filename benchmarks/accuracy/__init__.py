"""Benchmarks of what the methods reach on real data."""

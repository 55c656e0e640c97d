"""Benchmarks that kill processes and break devices."""

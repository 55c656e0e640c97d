"""Benchmarks of transport, brokers and bad networks."""

"""Benchmarks of memory, FLOPs, bytes and seconds."""

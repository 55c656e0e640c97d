"""Aggregation weights of the devices."""

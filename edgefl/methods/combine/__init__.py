"""Combination of the devices' updates: means, and statistics that a few of the devices cannot decide."""

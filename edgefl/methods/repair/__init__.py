"""Repairs of updates before they are aggregated: MMiC's poverty layer."""

"""Probes for what training really costs."""

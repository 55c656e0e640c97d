"""Simulators of a large fleet beside a bare loop."""

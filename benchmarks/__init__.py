"""Figures of the README and docs/results, each from one command, side by side in one run."""

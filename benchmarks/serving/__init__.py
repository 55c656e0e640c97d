"""Serving bundles: a fresh install, and answers under load."""

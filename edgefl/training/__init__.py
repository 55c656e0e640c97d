"""The local loop."""

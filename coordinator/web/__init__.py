"""The live page of a run: one snapshot a second of its events, shown to browsers as they come."""

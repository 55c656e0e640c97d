"""Files on disk: content-addressed objects, partial downloads, run directories."""

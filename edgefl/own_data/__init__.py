"""From a user's own files to a manifest and a run file (``edgefl init``)."""

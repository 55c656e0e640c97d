"""Child processes: a worker that answers requests over a pipe, and its end when the parent dies."""

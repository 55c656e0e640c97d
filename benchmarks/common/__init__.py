"""What several benchmarks share: fleets, in-process runs, plots, pages."""

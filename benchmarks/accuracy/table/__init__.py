"""The parts of ``benchmarks/accuracy/systems.py``: the grid of runs, how one is run and read, and the page."""

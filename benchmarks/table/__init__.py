"""The parts of ``benchmarks/systems.py``: the grid of runs, how one is run and read, and the page they become."""

"""The parts of ``benchmarks/accuracy/one_regime.py``: the grid of runs, how one is run and read, and the page."""

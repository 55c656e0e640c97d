"""Golden files of what a restructuring must not change: bytes on the wire, schemas, texts, results to the bit.

``EDGEFL_WRITE_PINS=1 python -m pytest tests/pins`` writes the files from what the code gives now (without ``-n``, whose
workers would write one file at a time each). A pin that changes on purpose is said in its commit, with the reason.
"""

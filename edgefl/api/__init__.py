"""The Python interface: what the command line does, as functions. ``import edgefl`` has their names."""

"""How devices are grouped."""

"""Joint steps: a prototype, its conditions, and its measurement beside one by one (docs/decisions/0105)."""

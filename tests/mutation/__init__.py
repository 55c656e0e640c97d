"""Whether the tests can fail: mutants of the code, by mutmut (docs/decisions/0039)."""

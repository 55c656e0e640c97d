"""Fuzzing of everything that turns somebody else's bytes into values: ``table`` lists the targets.

``tests/attacks/test_fuzz.py`` runs it in CI from the corpus and by hypothesis; ``make fuzz`` is guided by coverage
(``python -m fuzz`` with this package's folder on the path).
"""

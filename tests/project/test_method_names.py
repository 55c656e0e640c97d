"""The core knows roles, never names: what a method is called stands in ``edgefl/methods`` and in recipes alone."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.common.method_names import ORDINARY, in_source, product_files, spellings
from benchmarks.common.tree_facts import registered
from benchmarks.structure import compared_options

ROOT = Path(__file__).resolve().parents[2]
#: File -> the names it spells by right.
BY_RIGHT = {
    # The default recipe of a run file, which has the name of its schedule.
    "edgefl/config/settings.py": {"end_to_end"},
    # The bundle format's masks: a server reads and asks for them without loading methods.
    "edgefl/export/bundle_format.py": {"prototype", "reconstruction", "zero"},
    # Model types of the published checkpoints, as their config.json has them.
    "edgefl/encoder_families.py": {"clip"},
    # What a drafted run file says.
    "edgefl/own_data/draft.py": {"early_stopping"},
    # Defaults on the wire: a message that leaves the field out means these, whatever is the role's default.
    "edgefl/models/spec.py": {"concat", "separate"},
}
ROLES = {
    "cluster": frozenset({"none", "lsh"}),
    "weight": frozenset({"samples", "own", "cka"}),
    "missing": frozenset({"zero", "random", "prototype"}),
    "fusion": frozenset({"concat", "mean"}),
    "sharing": frozenset({"separate", "multiway"}),
    "objective": frozenset({"clip", "reconstruction"}),
}


def names(source: str) -> set[str]:
    return {found.name for found in in_source(source, "x.py", ROLES)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('if kind == "cka": pass', {"cka"}),
        ('TABLE = {"lsh": sketch}', {"lsh"}),
        ('if "own" in recipe["weight"]: pass', {"own"}),
        ('if slot.name == "none": pass', {"none"}),
        ('if job.model.fusion != "mean": pass', {"mean"}),
        ('if spec.encoder_sharing == "separate": pass', {"separate"}),
        ('options = job.slots.missing.get("prototype")', {"prototype"}),
        ('options = slots["missing"]["zero"]', {"zero"}),
        ('if plan.slots.cluster.keys() <= {"none"}: pass', {"none"}),
        ('DEFAULTS = {"cluster": "none", "weight": {"samples": {}}}', {"none", "samples"}),
        ('name, options = next(iter(recipe.get("cluster", {}).items()), ("none", {}))', {"none"}),
        ('name = next(iter(job.slots.weight))\nif name in {"samples", "many"}: pass', {"samples"}),
        ('for name in slots.missing:\n    if name == "zero": pass', {"zero"}),
        ('if {"reconstruction"} & set(terms): pass', {"reconstruction"}),
        ('if {"reconstruction"}.isdisjoint(job.slots.objective): pass', {"reconstruction"}),
        ('ODD = ("zero", "random")', {"zero", "random"}),
        ('def f(missing="zero"): pass', {"zero"}),
        ('match slot.name:\n    case "none": pass', {"none"}),
        ('class A:\n    def f(self):\n        return self._recipe["fusion"] == "mean"', {"mean"}),
    ],
)
def test_a_name_is_found_where_it_decides(source: str, found: set[str]) -> None:
    assert names(source) == found


@pytest.mark.parametrize(
    "source",
    [
        '"""cka"""',
        'raise ValueError("cka needs labels")',
        'loss(x, reduction="none")',
        'row = {"samples": len(data), "mean": total / len(data)}',
        'if encoder.pool == "mean": pass',
        'if slots.exchange == "own": pass',
        'if slots["cluster"].options["models"] == "own": pass',
        'name, options = next(iter(recipe.items()))\nif options["bound"] == "none": pass',
        'counts = data.get("samples") or {}',
        'if recipe.get("weight"): pass',
        'state = {"weight": weight, "cluster": cluster}',
    ],
)
def test_a_word_that_names_no_method_passes(source: str) -> None:
    assert names(source) == set()


def test_words_with_another_meaning_are_names_of_methods() -> None:
    assert frozenset().union(*registered().values()) >= ORDINARY


def test_a_tree_is_read_but_for_its_methods(tmp_path: Path) -> None:
    for file in ("edgefl/methods/fedmvp/cka.py", "coordinator/a.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text('NAME = "cka"\n')
    assert len(product_files(tmp_path)) == 2
    assert spellings(tmp_path, ROLES) == [("coordinator/a.py", 1, "cka")]


def test_no_method_is_named_outside_its_own_file_but_by_right() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for place in spellings(ROOT, registered()):
        found[place.file].add(place.name)
    assert found == BY_RIGHT, "a method's name belongs into edgefl/methods; ask the registry by role instead"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f(slot):\n    return slot.options.get("models") == "own"', [2]),
        ('def f(slot):\n    return slot.options["start"] != "gaussian"', [2]),
        ('def f(slot):\n    match = slot.options.get("match", "")\n    return match in {"prior", "classifier"}', [3]),
        ('def f(slot):\n    return slot.options["k"] > 3', []),
        ('def f(slot):\n    return slot.name == "own"', []),
    ],
)
def test_a_comparison_with_an_option_s_value_is_found(source: str, lines: list[int]) -> None:
    assert compared_options(source) == lines


def test_the_core_compares_no_option_s_value() -> None:
    """What an option's value decides is the method's own: a function of the options that the core calls."""
    files = {path.relative_to(ROOT).as_posix(): path for path in product_files(ROOT)}
    core = {file: path for file, path in files.items() if not file.startswith("edgefl/methods/")}
    found = {file: compared_options(path.read_text(encoding="utf-8")) for file, path in core.items()}
    assert {file: lines for file, lines in found.items() if lines} == {}

"""Problems of a recipe's methods with a run's labels."""

from __future__ import annotations

from edgefl.config.slots import RecipeConfig
from edgefl.data.label_sets import classes_in
from edgefl.errors import Problem
from edgefl.label_spaces import space_of, spaces_in
from edgefl.registry import chosen

#: Label sets of a run: of a device's hello 64 counts of samples are taken, those of its modalities among them.
MOST_SPACES = 32


def label_problems(recipe: RecipeConfig, label_names: tuple[str, ...]) -> list[Problem]:
    """Problems of methods with multi-label samples, or with devices' own label sets."""
    return _several(recipe, label_names) + _own_sets(recipe, label_names)


def _several(recipe: RecipeConfig, label_names: tuple[str, ...]) -> list[Problem]:
    if classes_in(label_names) is None:
        return []
    terms = [f"objective {t.name}" for t in chosen("objective", recipe.slots["objective"]) if t.method.one_label]
    tables = [f"prototypes {p.name}" for p in chosen("prototypes", recipe.slots["prototypes"]) if p.method.local]
    why = "goes by the one class of a sample, and these samples have several labels; leave it out"
    return [Problem(f"slots.{name.split()[0]}", f"{name.split()[1]} {why}") for name in (*terms, *tables)]


def _own_sets(recipe: RecipeConfig, label_names: tuple[str, ...]) -> list[Problem]:
    spaces = spaces_in(label_names)
    saying = [name for name in label_names if space_of(name)]
    if saying and not spaces:
        other = next(name for name in label_names if not space_of(name))
        text = f"label {saying[0]!r:.60} says its label set, and {other!r:.60} says none; write every one as @set:class"
        return [Problem("data", text)]
    if len(spaces) > MOST_SPACES:
        return [Problem("data", f"the labels are of {len(spaces)} label sets, and at most {MOST_SPACES} are taken")]
    if len(spaces) < 2:
        return []
    tables = [p.name for p in chosen("prototypes", recipe.slots["prototypes"]) if p.method.candidates]
    drawn = [m.name for m in chosen("missing", recipe.slots["missing"]) if m.method.completed_data]
    listed = f"and labels are of the sets {', '.join(spaces)}"
    return [
        *(Problem("slots.prototypes", f"{name} has a row a class, {listed}; set adaptive, or none") for name in tables),
        *(Problem("slots.missing", f"{name} draws from samples of one class, {listed}; set zero") for name in drawn),
    ]

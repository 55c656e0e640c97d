"""What terms need of a recipe, for several of them alike."""

from __future__ import annotations

from edgefl.errors import Problem
from edgefl.registry import Recipe, offers


def needs_class_means(term: str, recipe: Recipe) -> list[Problem]:
    """The term compares with class prototypes."""
    if offers(recipe, "prototypes", "classes"):
        return []
    return [Problem("objective", f"{term} needs class prototypes; set prototypes: class_mean, or leave the term out")]


def needs_adaptive(term: str, recipe: Recipe) -> list[Problem]:
    """The term compares with AproMFL's prototypes."""
    if offers(recipe, "prototypes", "merge"):
        return []
    return [Problem("objective", f"{term} needs adaptive prototypes; set prototypes: adaptive, or leave the term out")]


def needs_joint(term: str, recipe: Recipe) -> list[Problem]:
    """The term compares with the joint representation, which only labels train."""
    if offers(recipe, "objective", "labels"):
        return []
    text = f"{term} needs the joint representation, which is learned with labels; add the term cross_entropy"
    return [Problem("objective", text)]

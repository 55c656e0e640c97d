"""What the paths of a folder say: label, group, modality, id."""

from __future__ import annotations

import pytest

from edgefl.errors import DataError
from edgefl.own_data.layout import Layout, guess

PEOPLE = ("anna", "ben", "cem")
LABELS = ("run", "walk")


def paths(template: str, *, suffix: str = ".csv") -> list[str]:
    """Six recordings of each of two labels and three people, their paths by ``template``."""
    return [
        template.format(label=label, group=group, id=f"{number:02d}") + suffix
        for group in PEOPLE
        for label in LABELS
        for number in range(6)
    ]


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        (paths("{label}/{group}x{id}"), "{label}/{id}"),  # one level of folders is the label
        (paths("{group}/{label}_{id}"), "{group}/{label}_{id}"),  # but not where all of them hold the same classes
        ([f"person-{i}/{j:02d}.csv" for i in range(3) for j in range(6)], "{group}/{id}"),
        (paths("{group}/{label}/{id}"), "{group}/{label}/{id}"),
        (paths("{label}_{group}_{id}"), "{label}_{group}_{id}"),
        (paths("{group}-{label}-{id}"), "{label}_{group}_{id}"),  # which is which can't be seen: --path says it
        ([f"{n:03d}.png" for n in range(20)], "{id}"),
        ([f"acc/{n}.csv" for n in range(5)] + [f"gyro/{n}.csv" for n in range(5)], "{modality}/{id}"),
        ([f"a/{n}.png" for n in range(5)] + [f"b/{n}.wav" for n in range(5)], "{modality}/{id}"),  # by their kinds
        ([f"{m}_{n}.csv" for m in ("acc", "gyro") for n in range(5)], "{modality}_{id}"),
        ([f"{n}_{m}.csv" for m in ("acc", "gyro") for n in range(5)], "{id}_{modality}"),
    ],
)  # fmt: skip
def test_a_layout_is_guessed_from_names_that_repeat(given: list[str], layout: str):
    assert guess(given).template == layout


def test_files_of_one_sample_have_one_key():
    layout = Layout("{group}/{label}_{id}_{modality}")
    acc, gyro = layout.parts("anna/walk_03_acc"), layout.parts("anna/walk_03_GYRO")
    assert acc is not None
    assert gyro is not None
    assert (acc.key, acc.label, acc.group, acc.modality) == ("anna/walk_03", "walk", "anna", "acc")
    assert (gyro.key, gyro.modality) == (acc.key, "gyro")


def test_a_path_of_another_layout_has_no_parts():
    assert Layout("{group}/{label}/{id}").parts("anna/03") is None
    assert Layout("{label}_{id}").parts("walk") is None


def test_an_underscore_stands_for_a_hyphen_and_a_blank():
    found = Layout("{label}_{id}").parts("up stairs-3")
    assert found is not None
    assert found.label == "up"


@pytest.mark.parametrize(
    ("template", "fault"),
    [("{label}", "{id} is missing"), ("{id}/{id}", "{id} is there twice"), ("{id}_{person}", "{person} is unknown")],
)
def test_a_template_that_is_none_is_refused(template: str, fault: str):
    with pytest.raises(DataError, match="cannot be used") as refused:
        Layout(template)
    assert fault in refused.value.message
    assert "{group}/{label}/{id}" in refused.value.remedy


def test_characters_of_a_pattern_in_a_template_are_themselves():
    layout = Layout("run.1/{id}")
    assert layout.parts("run.1/a") is not None
    assert layout.parts("runx1/a") is None

"""Columns that a model knows, among names that differ in their spelling, and those that are not there."""

from __future__ import annotations

import pytest

from edgefl.data.column_names import column_names


def test_capitals_blanks_and_signs_between_words_do_not_count():
    found = column_names(["ship_mode", "Sub.Category", "Sales", "row"], ["Ship Mode", "Sub-Category", "Sales"])
    assert found.renamed == {"ship_mode": "Ship Mode", "Sub.Category": "Sub-Category"}
    assert found.lacking == {}
    assert found.notes("") == [
        "columns by another spelling: 'ship_mode' as 'Ship Mode', 'Sub.Category' as 'Sub-Category'"
    ]


def test_what_may_be_one_of_two_is_named_and_not_taken():
    assert column_names(["x_1", "X1"], ["x1"]).renamed == {}
    assert column_names(["x_1"], ["x1", "X1"]).renamed == {}
    assert column_names(["profit", "Profit"], ["Profit"]) == ({}, {})


def test_the_nearest_name_is_told_and_first():
    found = column_names(["Discont", "City", "City Name"], ["Country", "Region", "Discount"])
    assert found.lacking == {"Discount": "Discont", "Country": "", "Region": ""}
    (note,) = found.notes("missing")
    assert note == "no column 'Discount' (there is 'Discont'), 'Country', 'Region': missing"


@pytest.mark.timeout(60)
def test_names_by_the_thousand_do_not_take_minutes():
    found = column_names([f"name{i:06}" for i in range(100_000)], [f"Name {i:06}." for i in range(99_800, 100_200)])
    assert (len(found.renamed), len(found.lacking)) == (200, 200)


def test_a_point_or_a_sign_before_a_digit_is_part_of_the_name():
    found = column_names(["x.2", "lag-1", "t 1.5", "Body.Mass"], ["x2", "lag1", "t_15", "body mass"])
    assert found.renamed == {"Body.Mass": "body mass"}
    assert set(found.lacking) == {"x2", "lag1", "t_15"}

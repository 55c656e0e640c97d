"""The drafted run file: settings that few samples train with."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.own_data.draft import Outline, Paths, Wishes, encoders, run_values
from edgefl.own_data.facts import Facts

PICTURES = {"image": Facts("vision", sides=[32] * 9)}


def drafted(samples: int, facts: dict[str, Facts] = PICTURES) -> dict[str, Any]:
    values: dict[str, Any] = run_values(Paths("own", "own"), facts, Outline(samples, True, 0), Wishes(("cpu", "cpu")))
    return values


@pytest.mark.parametrize(("samples", "norm"), [(32, "layer"), (400, None)])
def test_batches_of_few_rows_have_no_batch_norm(samples: int, norm: str | None) -> None:
    values = drafted(samples)
    assert values["model"]["head"].get("norm") == norm
    assert (values["training"]["batch_size"] < 8) == (norm == "layer")


def test_texts_become_bags_as_long_as_their_n_grams() -> None:
    drawn = drafted(400, {"text": Facts("text", words=[20] * 50)})["model"]["encoders"]
    assert drawn["text"]["arch"] == "bag"
    assert drawn["text"]["length"] >= 200


@pytest.mark.parametrize(("side", "size", "patch"), [(20, 32, 8), (32, 32, 8), (50, 48, 8), (300, 64, 16)])
def test_pictures_go_through_convolutions(side: int, size: int, patch: int) -> None:
    drawn = drafted(400, {"image": Facts("vision", sides=[side] * 9)})["model"]["encoders"]
    assert drawn["image"] == {"kind": "vision", "size": "small", "image_size": size, "arch": "conv", "patch": patch}


@pytest.mark.parametrize(
    ("side", "fields"),
    [(8, {"arch": "conv", "patch": 2}), (28, {"arch": "conv", "patch": 4}), (35, {"patch": 5}), (7, {"patch": 1})],
)
def test_arrays_of_pictures_are_cut_as_their_side_allows(side: int, fields: dict[str, Any]) -> None:
    assert encoders({"image": Facts("vision", sides=[side])}, "small", raw=False)["image"] == {
        "kind": "vision", "size": "small", **fields,
    }  # fmt: skip


@pytest.mark.parametrize(("samples", "judged"), [(3000, True), (400, False)])
def test_stages_of_a_table_end_by_hold_outs_where_devices_have_rows_for_them(samples: int, judged: bool) -> None:
    values = drafted(samples, {"features": Facts("table")})
    assert ("slots" in values) is ("holdout" in values["training"]) is judged
    assert values.get("slots", {}).get("pace", "") == ("early_stopping" if judged else "")
    assert (values["training"]["rounds"][0] == 40) is judged
    wishes = Wishes(("cpu", "cpu"), recipe="mmic-layer")
    own = run_values(Paths("own", "own"), {"features": Facts("table")}, Outline(samples, True, 0), wishes)
    assert "slots" not in own, "a recipe of the user's own may not take it"


@pytest.mark.parametrize(("samples", "judged"), [(203, True), (90, False)])
def test_stages_of_a_number_end_by_fewer_rows(samples: int, judged: bool) -> None:
    outline = Outline(samples, True, 0, numeric=True)
    values = run_values(Paths("own", "own"), {"features": Facts("table")}, outline, Wishes(("cpu", "cpu")))
    assert values.get("slots", {}) == ({"pace": "early_stopping"} if judged else {})
    assert values["training"].get("holdout", 0.0) == (0.2 if judged else 0.0)
    assert drafted(samples, {"features": Facts("table")}).get("slots", {}) == {}, "classes take more rows"

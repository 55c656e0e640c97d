"""The drafted run file: settings that few samples train with."""

from __future__ import annotations

from typing import Any

import pytest

from edgefl.own_data.draft import Outline, Paths, Wishes, run_values
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
    encoders = drafted(400, {"text": Facts("text", words=[20] * 50)})["model"]["encoders"]
    assert encoders["text"]["arch"] == "bag"
    assert encoders["text"]["length"] >= 200

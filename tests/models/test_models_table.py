"""The table encoder: its tokens by hand, cells that are not there, and no cell that drowns the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from export_fixture import sensor, some_state, stage_of

from edgefl.data.dataset import Dataset
from edgefl.data.dates import date_form, moment_of
from edgefl.data.moments import moments_of
from edgefl.data.table_cells import cells_of
from edgefl.errors import DataError
from edgefl.export.bundle import export_bundles
from edgefl.export.drafts import TrainedState
from edgefl.export.runtime import load_bundle
from edgefl.models.check import encoder_of_size, spec_problems
from edgefl.models.encoder import initialise
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.models.table import TableEmbed
from edgefl.records import MAX_COLUMNS, TableColumn

COLUMNS = (TableColumn("mass"), TableColumn("island", "category", ("Biscoe", "Dream")), TableColumn("day", "date"))


def encoder(columns: tuple[TableColumn, ...] = COLUMNS, **changes: object) -> EncoderSpec:
    shape = (len(columns), 2)
    return encoder_of_size("table", "tiny", shape, **{"columns": [msgspec.to_builtins(c) for c in columns], **changes})


def test_a_number_is_compressed_far_out_and_times_its_vector():
    """(30 - 10) / 2 = 10 deviations are 3 asinh(10 / 3) = 5.757; (12 - 10) / 2 = 1 is 0.982; nothing is infinite."""
    embed = TableEmbed(encoder(COLUMNS[:1], mean=(10.0,), std=(2.0,)))
    with torch.no_grad():
        embed.weight.weight.fill_(1.0)
        embed.bias.weight.fill_(0.5)
        embed.missing.weight.fill_(-7.0)
    tokens = embed(torch.tensor([[[30.0, 1.0]], [[12.0, 1.0]], [[1e30, 1.0]], [[0.0, 0.0]]])).tokens
    expected = [5.7567 + 0.5, 0.9824 + 0.5, 26.4147 + 0.5, -7.0]
    np.testing.assert_allclose(tokens[:, 1, 0].detach().numpy(), expected, atol=1e-3)


def test_a_category_is_a_row_by_its_code_and_one_that_is_not_known_is_missing():
    embed = TableEmbed(encoder())
    initialise(embed)
    x = torch.tensor(
        [[[1.0, 1.0], [code, there], [1.0, 1.0]] for code, there in ((0, 1), (1, 1), (2, 1), (-1, 1), (1, 0))]
    )
    tokens = embed(x).tokens[:, 3]  # after the class token and those of two numbers
    rows = embed.vectors.weight
    assert [int((rows == token).all(dim=1).nonzero()) for token in tokens] == [1, 2, 0, 0, 0]


def test_what_stands_in_a_cell_that_is_not_there_does_not_count():
    model = build(ModelSpec(encoders={"t": encoder()}, head=HeadSpec(8, 8), stages=3)).eval()
    x = torch.tensor([[[3.0, 1.0], [0.0, 0.0], [0.0, 0.0]], [[3.0, 1.0], [1.0, 0.0], [99.0, 0.0]]])
    first, second = model.encode("t", x)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": ()}, ""),
        ({"input_shape": (2, 2)}, "describes 3 columns"),
        ({"input_shape": (3, 1)}, "table's cell is two numbers"),
        ({"columns": (), "input_shape": (MAX_COLUMNS + 1, 2)}, "at most 512"),
        ({"columns": (*COLUMNS[:2], TableColumn("mass"))}, "has the name 'mass' twice"),
        ({"columns": (*COLUMNS[:2], TableColumn("x", "category"))}, "a category has values"),
        ({"columns": (*COLUMNS[:2], TableColumn("x", values=("a",)))}, "a category has values"),
        ({"columns": (*COLUMNS[:2], TableColumn("x", "date", unit="%Y%Y%Y"))}, "dates are read as"),
        ({"columns": tuple(TableColumn(f"{i:0>190}") for i in range(200)), "input_shape": (200, 2)}, "bytes of names"),
        ({"mean": (0.0,), "std": (1.0,)}, "for 3 channels"),
    ],
)
def test_a_description_that_fits_no_table_is_a_fault(changes: dict[str, object], message: str):
    spec = ModelSpec(encoders={"t": msgspec.structs.replace(encoder(), **changes)}, stages=3)
    found = [problem.message for problem in spec_problems(spec)]
    assert any(message in one for one in found) if message else not found


def test_a_description_beyond_its_bounds_is_not_decoded():
    for column in ({"name": "x" * 201}, {"name": "x", "kind": "category", "values": ["a"] * 257}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"columns": [column]}, EncoderSpec)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"columns": [{"name": "x"}] * (MAX_COLUMNS + 1)}, EncoderSpec)


def _cells(values: list[list[float]]) -> Dataset:
    array = np.array(values, np.float32)
    there = ~np.isnan(array)
    cells = np.stack((np.nan_to_num(array), there.astype(np.float32)), axis=2)
    return Dataset({"t": cells}, {"t": np.ones(len(cells), bool)}, None, (), [str(i) for i in range(len(cells))])


def test_one_cell_far_out_does_not_crush_its_column():
    """Of 0..98 and 1e6 the median is 49.5, the upper quartile of the distances from it 37.5: 1e6 counts as 237."""
    column = [float(i) for i in range(99)] + [1e6]
    found = moments_of(_cells([[v] for v in column]), {"t": encoder(COLUMNS[:1])}, 2)["t"]
    clipped = np.array([*column[:-1], 237.0])
    np.testing.assert_allclose(found.mean[0], clipped.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.variance[0], clipped.var(), rtol=1e-6)
    assert found.variance[0] ** 0.5 < 40


def test_moments_are_over_the_cells_that_are_there_and_not_of_categories():
    rows = [[1.0, 0.0, float("nan")], [3.0, 1.0, 5.0], [float("nan"), 1.0, 7.0]]
    found = moments_of(_cells(rows), {"t": encoder()}, 2)["t"]
    assert found.count == 3
    assert (found.mean, found.variance, found.counts) == ((2.0, 0.0, 6.0), (1.0, 0.0, 1.0), (2, 0, 2))


def test_a_row_of_cells_by_name():
    cells = cells_of({"island": "Dream", "mass": "3,5", "day": "1970-01-03", "more": 1}, COLUMNS)
    assert cells.tolist() == [[3.5, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert cells_of({"island": "Mars", "mass": "NA", "day": "1970-01-02T12:00"}, COLUMNS).tolist() == [
        [0, 0],
        [0, 0],
        [1.5, 1],
    ]
    for value, message in [
        ({"mass": "heavy"}, "column mass: 'heavy' is no number"),
        ({"day": "yesterday"}, "column day: 'yesterday' is no date"),
        ({"mass": 1e300}, "too large"),
        ({"else": 1}, "has no cell of its 3 columns: mass, island, day"),
        ([1, 2], "has 2 cells"),
        ("a", "an object of cells"),
    ]:
        with pytest.raises(DataError, match=message):
            cells_of(value, COLUMNS)


def test_forms_of_dates():
    assert date_form(["2026-05-01", "2026-05-02 12:00"]) == ""
    assert date_form(["2012/01/01"]) == "%Y/%m/%d"
    assert date_form(["01.02.2012", "31.12.2012"]) == "%d.%m.%Y"
    assert date_form(["12/31/2012", "01/02/2012"]) == "%m/%d/%Y"
    assert date_form(["31.12.99 23:59", "01.02.12 7:05"]) == "%d.%m.%y"
    assert date_form(["3/31/2012 2:05 PM", "3/1/2012 12:05:07,5 am"]) == "%m/%d/%Y"
    assert date_form(["2012-03-01 10:00:00.5 UTC", "2012-03-01T10:00Z"]) == ""
    assert date_form(["12:30", "7:05:01"]) == "%H:%M"
    assert date_form(["soon"]) is None
    assert date_form(["25:00"]) is None


def test_noon_and_midnight():
    hours = [moment_of(f"1/2/2012 {clock}", "%m/%d/%Y") for clock in ("12:00 AM", "1:00 AM", "12:00 PM", "11:59 p.m.")]
    assert [moment.hour for moment in hours if moment] == [0, 1, 12, 23]


def test_an_array_of_numbers_is_a_table_with_missing_cells(tmp_path: Path):
    np.savez(tmp_path / "a.npz", t=np.array([[1.0, np.nan], [2.0, 3.0]]))
    found = Dataset.load_npz(tmp_path / "a.npz", {"t": EncoderSpec("table", (2, 2))})
    assert found.modalities["t"].tolist() == [[[1, 1], [0, 0]], [[2, 1], [3, 1]]]


def test_a_table_beside_a_sensor_as_a_bundle(tmp_path: Path):
    """The bundle answers as torch does within 1e-4, cells that are missing and categories beyond the list included."""
    spec = ModelSpec(
        encoders={"t": encoder(mean=(4000.0, 0.0, 15000.0), std=(800.0, 1.0, 30.0)), "acc": sensor(depth=3)},
        stages=3, head=HeadSpec(16, 8), fusion_width=12, classes=2, label_names=("a", "b"),
    )  # fmt: skip
    model, parts = some_state(spec)
    rows = export_bundles(TrainedState(spec, stage_of(spec, 3), parts), tmp_path / "bundles", mask="zero")
    assert {row.name for row in rows} == {"t", "acc", "t+acc"}
    bundle = load_bundle(tmp_path / "bundles/t")
    assert bundle.manifest.encoders["t"].columns == COLUMNS
    x = np.stack([cells_of({"mass": 3700, "island": "Dream"}, COLUMNS), cells_of({"day": "2011-01-02"}, COLUMNS)])
    with torch.no_grad():
        r = model.project("t", model.encode("t", torch.from_numpy(x)))
        zero = torch.zeros_like(r)
        expected = model.classify(model.fuse({"t": r, "acc": zero})).numpy()
    np.testing.assert_allclose(bundle.predict({"t": x}, mask="zero").logits, expected, atol=1e-4)

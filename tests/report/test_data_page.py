"""The page of what goes into a model: what it shows is what the shares hold."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import altair as alt
import numpy as np
import pytest
from PIL import Image
from test_brief_pages import shown
from test_cli_read import edgefl
from test_report_pages import Outline

from edgefl.data.dataset import Dataset
from edgefl.models.spec import EncoderSpec
from edgefl.records import TableColumn
from edgefl.report.charts import NARROW, WIDE
from edgefl.report.data_page import Data, headline, remarks, to_html
from edgefl.report.data_pictures import NONE, examples, label_counts, labels, lines, spectrogram

RUN = """
name: zoo
data: {source: zoo, partition: uniform}
model:
  stages: 2
  encoders:
    image: {kind: vision, size: tiny, image_size: 16, patch: 4, crop: center}
    text: {kind: text, size: tiny, arch: bag, length: 16, vocabulary: 4096}
    acc: {kind: sensor, size: tiny, patch: 4}
    bird: {kind: table, size: tiny, depth: 2, columns: {mass: number in g, isle: [Biscoe, Dream], born: date}}
fleet: [{name: left}, {name: right}]
training: {rounds: [1, 1], batch_size: 4}
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A run file and 20 samples: pictures of another size, texts, recordings, and rows with absent cells."""
    folder, rng = tmp_path / "zoo", np.random.default_rng(0)
    folder.mkdir()
    lines = []
    for i in range(20):
        Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a cat" if i else "a cat that is called <b>Mieze</b> & sleeps all day")
        bird = {"mass": 100 + i if i % 4 else None, "isle": "Dream" if i < 5 else "Biscoe", "born": "2024-05-01"}
        sample = {"id": f"s{i}", "label": ["cat", "dog"][i % 2], "image": f"{i}.png", "text": f"{i}.txt"}
        lines.append(json.dumps({**sample, "acc": rng.normal(size=(12, 2)).tolist(), "bird": bird}))
    (folder / "manifest.jsonl").write_text("\n".join(lines))
    (tmp_path / "zoo.yaml").write_text(RUN)
    return tmp_path


def test_the_page_shows_samples_as_they_are_prepared(zoo: Path, capsys: pytest.CaptureFixture[str]):
    words = ("data", str(zoo / "zoo.yaml"), "--show", str(zoo / "zoo.html"), "--out", str(zoo / "shares"))
    code, out, err = edgefl(*words, capsys=capsys)
    assert code == 0, err
    assert "Shares of zoo" in out
    page = (zoo / "zoo.html").read_text()
    outline = Outline()
    outline.feed(page)
    assert all(address.startswith("data:image/png;base64,") for address in outline.outward)
    assert len(outline.ids) == len(set(outline.ids))
    assert not re.search(r"<script|<link|<iframe|@import", page)
    shares = {name: Dataset.load_npz(zoo / "shares" / f"{name}.npz") for name in ("left", "right", "test")}
    prepared = {name: share.modalities["image"][row] for share in shares.values() for row, name in enumerate(share.ids)}
    pictures = re.findall(r'<span title="(s\d+)"><img src="data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == 20
    for name, text in pictures:
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))) / 255
        np.testing.assert_allclose(pixels, prepared[name], atol=0.5 / 255 + 1e-6)
    text_of_page = re.sub(r"\s+", " ", shown(page))
    for one in (
        "2 labels are learned from image, text, acc and bird; the most frequent, cat, is 50.0",
        "16 samples to train on · 4 held out for the test · 2 devices",
        "a cat that is called <b>Mieze</b> & sleeps all day",
        "5.0 % of the texts fill all places",
        "mass number g 25.0 % 101 to 119, 110 in the median",
        "isle category 0 Biscoe 75 %, Dream 25 %",
        "born date 0 2024-05-01 to 2024-05-01",
    ):
        assert one in text_of_page, one


def test_the_page_goes_to_stdout_alone(zoo: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = edgefl("data", str(zoo / "zoo.yaml"), "--show", "-", capsys=capsys)
    assert code == 0
    assert out.startswith("<!doctype html>")
    assert out.rstrip().endswith("</html>")


def shares(labels: list[int], *, numeric: bool = False) -> dict[str, Dataset]:
    """Two shares of half of the samples each."""
    count = len(labels)
    data = Dataset(
        {"acc": np.arange(count * 6, dtype=np.float32).reshape(count, 3, 2)},
        {"acc": np.ones(count, bool)},
        np.array(labels),
        tuple("abcdefghijklmnopqrstuvwxyz"),
        [str(i) for i in range(count)],
        targets=np.array(labels, np.float64) if numeric else None,
    )
    half = count // 2
    return {"left": data.subset(np.arange(half)), "right": data.subset(np.arange(half, count))}


def test_examples_are_of_every_label_and_of_several_shares():
    found = examples(shares([0, 0, 0, 1, 0, 0, 0, 1]), "acc", 3)
    assert [(one.label, one.share) for one in found] == [("a", "left"), ("b", "right"), ("a", "right")]


def test_a_device_lacks_classes_of_its_own_label_sets_alone():
    names = ("@animal:cat", "@animal:dog", "@animal:cow", "@plant:oak", "@plant:elm")
    sets = {name: replace(share, label_names=names) for name, share in shares([0, 1, 0, 3, 3, 4]).items()}
    page = Data("zoo", sets, sets["left"], {"acc": EncoderSpec("sensor")})
    assert list(remarks(page)) == ["left has no sample of animal:cow."]


def test_counts_of_labels_are_those_of_the_shares_and_rare_ones_are_others():
    many = [i % 25 for i in range(50)] + [0, -1]
    counts = label_counts(shares(many))
    total = counts["left"] + counts["right"]
    assert total["a"] == 3
    assert total[NONE] == 1
    assert total["others"] == 2 * 9
    assert total.total() == 52


def test_several_labels_are_counted_by_the_samples_that_have_them():
    sets = np.array([[1, 1], [1, 0], [1, 1], [0, 0], [0, 1]], bool)
    every = Dataset(
        {"acc": np.zeros((5, 3, 2), np.float32)},
        {"acc": np.ones(5, bool)},
        sets.argmax(1),
        ("&hot", "&wet"),
        list("abcde"),
        sets=sets,
    )
    data = Data("tags", {"one": every.subset([0, 1, 2, 3])}, every.subset([4]), {"acc": EncoderSpec("sensor", (3, 2))})
    assert (
        headline(data)
        == "2 labels are learned from acc; the most frequent, hot, is on 75.0\N{NO-BREAK SPACE}% of the samples."
    )


def test_numbers_are_counted_in_spans_of_as_many_samples():
    counts = label_counts(shares(list(range(24)), numeric=True))
    total = counts["left"] + counts["right"]
    assert list(total.values()) == [3] * 8
    assert counts["right"]["0 to 2.88"] == 0


def test_low_bands_are_below_and_time_goes_to_the_right():
    levels = np.zeros((4, 3), np.float32)
    levels[3, 0] = 1  # the last frame, the lowest band
    picture = spectrogram(levels)
    assert picture.shape == (3, 4, 3)
    dark = picture.sum(axis=2)
    assert np.unravel_index(dark.argmin(), dark.shape) == (2, 3)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_charts_are_valid_and_hold_every_channel(width: int):
    of = shares([0, 1, 0, 1])
    first = labels(of)
    assert first is not None
    chart = lines("acc", {"a · left": np.arange(600.0).reshape(300, 2)}, ["x", "y"], 50.0, "")
    for one in (first, chart):
        alt.Chart.from_dict(one.spec(width))
    values = chart.spec(width)["data"]["values"]
    assert {row["channel"] for row in values} == {"x", "y"}
    assert max(row["t"] for row in values) == 5.96
    assert labels({name: Dataset(d.modalities, d.present, None, (), d.ids) for name, d in of.items()}) is None


def test_values_beyond_pictures_and_names_beyond_text_are_safe():
    rows = np.linspace(-3, 5, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
    evil = "<script>x</script>\x1b[31m"
    data = Dataset({"image": rows}, {"image": np.ones(2, bool)}, np.array([0, 1]), (evil, "b"), [evil, "2"])
    page = to_html(Data(evil, {"left": data}, data, {"image": EncoderSpec("vision", (8, 8, 3))}), [])
    assert "<script" not in page
    assert "\x1b" not in page
    assert "values from -3.00 to 5.00" in shown(page)


def test_a_column_without_a_value_is_none():
    cells = np.zeros((2, 1, 2), np.float32)
    data = Dataset({"t": cells}, {"t": np.ones(2, bool)}, np.array([0, 1]), ("a", "b"), ["1", "2"])
    encoder = EncoderSpec("table", (1, 2), columns=(TableColumn("mass"),))
    assert "100.0 % none" in re.sub(r"\s+", " ", shown(to_html(Data("x", {"left": data}, data, {"t": encoder}), [])))

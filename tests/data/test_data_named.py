"""Named data sets. BasicMotions comes with sktime; the others need EDGEFL_DATA."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import weakref
from collections import Counter

import numpy as np
import pytest
from data_fixture import needed

from edgefl.data import named as named_module
from edgefl.data.named import NAMED, ORIGINS, _last_in_time, named
from edgefl.data.sources import fit, load, load_pair
from edgefl.data.ts_files import read_ts
from edgefl.errors import DataError, MissingDependencyError
from edgefl.models.spec import EncoderSpec


@pytest.fixture
def sets(request):
    """Skips a test whose data is absent, unless EDGEFL_REQUIRE_DATA=1."""
    return needed(request.node.get_closest_marker("data").kwargs["name"])


def test_basic_motions_windows_by_hand():
    """(100 - 50) / 10 + 1 = 6 windows of each of 40 series, four classes of ten series each."""
    train, test, groups, _ = named("basic_motions")
    assert len(train) == len(test) == 240
    assert train.signature() == {"acc": (50, 3), "gyro": (50, 3)}
    assert train.label_names == ("Standing", "Running", "Walking", "Badminton")
    assert train.class_counts() == test.class_counts() == (60, 60, 60, 60)
    assert len(set(groups)) == 40
    assert not set(groups) & set(test.groups)
    assert all((train.labels[groups == g] == train.labels[groups == g][0]).all() for g in set(groups))


def test_basic_motions_values_are_the_files():
    """First value of the file is 0.079106, the sixth dimension's first step comes last."""
    raw, _, _, _ = named("basic_motions", {"standardise": "none", "window": 100, "step": 100})
    assert raw.modalities["acc"][0, 0, 0] == np.float32(0.079106)
    assert raw.modalities["acc"][0, :3, 1] == pytest.approx([0.394032, 0.394032, -3.666397])
    fixed, _, _, _ = named("basic_motions", {"window": 100, "step": 100})
    assert fixed.modalities["acc"] == pytest.approx(raw.modalities["acc"] / 6, abs=1e-6)
    second, _, _, _ = named("basic_motions", {"standardise": "none", "window": 60, "step": 40})
    assert (second.modalities["gyro"][1] == raw.modalities["gyro"][0, 40:]).all()
    window, _, _, _ = named("basic_motions", {"standardise": "window"})
    assert np.abs(window.modalities["gyro"].mean(axis=1)).max() < 1e-4


def test_the_set_can_be_told_apart():
    """Mean and deviation of each channel, nearest class centroid: simple statistics are nearly enough."""
    train, test, _, _ = named("basic_motions")

    def features(data):
        both = [data.modalities[m] for m in ("acc", "gyro")]
        return np.concatenate([f(axis=1) for v in both for f in (v.mean, v.std)], axis=1)

    centres = np.stack([features(train)[train.labels == c].mean(axis=0) for c in range(4)])
    nearest = ((features(test)[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == test.labels).mean() > 0.95


def test_without_sktime_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="sktime") as caught:
        named("basic_motions")
    assert "edgefl-toolkit[demo]" in caught.value.remedy


def test_loading_executes_none_of_the_heavy_packages():
    code = (
        "import sys; from edgefl.data.prepare import prepare_shares; from edgefl.data.sources import load; "
        "assert len(load('basic_motions')) == 240; "
        "bad = {'torch', 'sktime', 'pandas', 'PIL', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@classLabel true a b\n@data\n1,2:3,4:c\n", "x.ts:3"),
        ("@classLabel true a b\n@data\n1,x:3,4:a\n", "x.ts:3"),
        ("@classLabel true a b\n@data\n1,2:3:a\n", "unequal length"),
        ("@classLabel true a b\n@data\n1,nan:3,4:a\n", "not finite"),
        ("", "unequal length"),
    ],
)
def test_damaged_ts_files(tmp_path, text, message):
    path = tmp_path / "x.ts"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_ts(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"basic_motion": {}}, "unknown data set 'basic_motion'"),
        ({"basic_motions": {"windows": 50}}, "no option windows"),
        ({"basic_motions": {"window": 101}}, "window is 101"),
        ({"basic_motions": {"step": 0}}, "step is 0"),
        ({"basic_motions": {"standardise": "yes"}}, "standardise is 'yes'"),
        ({"basic_motions": {"part": "half"}}, "part is 'half'"),
        ({"har_hapt": {"classes": "few"}}, "classes is 'few'"),
        ({"har_hapt": {"clients": 31}}, "clients is 31"),
        ({"har_hapt": {"test_share": 1.0}}, "test_share is 1.0"),
        ({"emoji_pairs": {"vendors": ["acme"]}}, r"vendors\[0\] is 'acme'"),
        ({"emoji_pairs": {"vendors": []}}, "no vendor"),
        ({"a": {}, "b": {}}, "not 2"),
        ("nowhere/at/all", "does not exist"),
        (__file__, "neither a folder nor an .npz or .jsonl"),
    ],
)
def test_bad_sources_and_options(source, message):
    with pytest.raises(DataError, match=message):
        load(source)


def test_absent_data_names_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEFL_DATA", str(tmp_path))
    for name in ("har_hapt", "av_digits", "emoji_pairs"):
        with pytest.raises(DataError, match=f"'{name}' is not here") as caught:
            load(name)
        assert "EDGEFL_DATA" in caught.value.remedy
        assert (f"`edgefl data fetch {name}`" if name == "har_hapt" else ORIGINS[name]) in caught.value.remedy


def test_part_and_fit_to_a_model():
    test = load({"basic_motions": {"part": "test"}})
    assert test.ids[0].startswith("test-")
    encoders = {"acc": EncoderSpec(input_shape=(50, 3))}
    assert list(fit(load("basic_motions"), "share", "error", encoders, ()).modalities) == ["acc"]
    train, tested = load_pair("basic_motions", modalities=encoders)
    assert list(train.modalities) == list(tested.modalities) == ["acc"]
    with pytest.raises(DataError, match=r"'acc' have shape \[50, 3\], the encoder takes \[100, 3\]"):
        load("basic_motions", modalities={"acc": EncoderSpec(input_shape=(100, 3))})
    with pytest.raises(DataError, match="has acc, gyro, and the model takes image"):
        load("basic_motions", modalities={"image": EncoderSpec(kind="vision")})
    with pytest.raises(DataError, match="no token ids"):
        load("basic_motions", modalities={"acc": EncoderSpec(kind="text")})


def test_last_in_time_by_hand():
    """One person, one activity, 128-sample windows at 0, 64, …, 576 of one recording; a share of 0.3 of ten windows."""
    raw = {
        "start": np.arange(10, dtype=np.int32)[::-1] * 64,
        "experiment": np.ones(10, dtype=np.uint8),
        "subject": np.ones(10, dtype=np.uint8),
        "label": np.zeros(10, dtype=np.uint8),
    }
    # The last three in time test; the one before them shares 64 samples with a test window.
    assert _last_in_time(raw, 0.3).tolist() == [1, 1, 1, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.data(name="har_hapt")
@pytest.mark.usefixtures("sets")
def test_har_official_split_and_clients():
    train, test, groups, _ = named("har_hapt", {"mini": True})
    assert (len(train), len(test)) == (144, 144)
    assert train.signature() == {"acc": (128, 3), "gyro": (128, 3)}
    assert not set(groups) & set(test.groups)
    raw, *_ = named("har_hapt", {"mini": True, "standardise": "none"})
    assert np.allclose(raw.modalities["acc"], 0.4 * train.modalities["acc"] + (0.8, 0.03, 0.1), atol=1e-6)
    assert np.allclose(raw.modalities["gyro"], 0.35 * train.modalities["gyro"], atol=1e-6)
    own, held, groups, _ = named("har_hapt", {"mini": True, "clients": 6})
    assert len(set(groups)) == 6
    assert set(groups) == set(held.groups)
    all_of = Counter((i[:2], int(y)) for part in (train, test) for i, y in zip(part.ids, part.labels, strict=True))
    held_of = Counter((i[:2], int(y)) for i, y in zip(held.ids, held.labels, strict=True))
    assert held_of == {key: round(0.3 * n) for key, n in all_of.items() if n > 1 and round(0.3 * n)}  # per recording
    assert len(own) + len(held) <= 288
    few, _, groups, _ = named("har_hapt", {"mini": True, "clients": 2, "signal": "body", "classes": "all"})
    assert len(set(groups)) == 2
    assert abs(few.modalities["acc"].mean()) < 0.1  # gravity is gone
    with pytest.raises(DataError, match="has 6 people here, not 7"):
        named("har_hapt", {"mini": True, "clients": 7})


@pytest.mark.data(name="har_hapt")
@pytest.mark.usefixtures("sets")
def test_har_in_full():
    train, test, groups, _ = named("har_hapt")
    assert (len(train), len(test), len(set(groups))) == (7415, 2996, 21)
    assert train.class_counts() == (1226, 1073, 987, 1293, 1423, 1413)
    _, held, groups, _ = named("har_hapt", {"clients": 30})
    assert len(set(groups)) == len(set(held.groups)) == 30


@pytest.mark.data(name="av_digits")
@pytest.mark.usefixtures("sets")
def test_av_digits():
    train, test, groups, _ = named("av_digits", {"mini": True})
    assert (len(train), len(test)) == (480, 160)
    assert train.signature() == {"image": (28, 28, 1), "audio": (61, 40)}
    assert len(set(groups)) == 6
    assert 0 <= train.modalities["audio"].min() < train.modalities["audio"].max() <= 1


@pytest.mark.data(name="emoji_pairs")
@pytest.mark.usefixtures("sets")
def test_the_files_of_pictures_are_let_go_before_the_pictures_become_floats(monkeypatch):
    files: list[weakref.ref] = []
    held: list[bool] = []
    read, make = named_module.read_npz, named_module.tokenizer

    def reading(path):
        arrays = read(path)
        files.append(weakref.ref(arrays["image"]))
        return arrays

    def making(*args):
        held.extend(file() is not None for file in files)
        return make(*args)

    monkeypatch.setattr(named_module, "read_npz", reading)
    monkeypatch.setattr(named_module, "tokenizer", making)
    named("emoji_pairs", {"vendors": ["noto", "fxemoji"]})
    assert held == [False, False]


@pytest.mark.data(name="emoji_pairs")
@pytest.mark.usefixtures("sets")
def test_emoji_pairs():
    train, test, groups, _ = named("emoji_pairs", {"mini": True, "length": 10, "vocabulary": 500})
    assert (len(train), len(test)) == (320, 128)
    assert train.signature() == {"image": (32, 32, 3), "text": (10,)}
    assert train.modalities["text"].max() < 500
    assert set(groups) == {"openmoji", "twemoji", "noto", "fxemoji"}
    assert not {i.split("-")[1] for i in train.ids} & {i.split("-")[1] for i in test.ids}  # new concepts
    one, _, groups, _ = named("emoji_pairs", {"vendors": ["fxemoji"]})
    assert one.signature()["image"] == (64, 64, 3)
    assert set(groups) == {"fxemoji"}


def test_the_list_of_names():
    assert list(NAMED) == ["basic_motions", "har_hapt", "av_digits", "emoji_pairs"]

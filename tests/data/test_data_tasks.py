"""Tasks made of named data sets: reserved shares, digits paired anew, finer classes, tests of what no device has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from data_fixture import needed

from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.data.named import named
from edgefl.data.reserve import draw, repaired
from edgefl.data.sources import as_test, load
from edgefl.errors import DataError


@pytest.fixture(autouse=True)
def sets(request):
    """Skips a test whose data is absent, unless EDGEFL_REQUIRE_DATA=1."""
    marker = request.node.get_closest_marker("data")
    return marker and needed(marker.kwargs["name"])


def test_a_draw_by_hand():
    """Two strata of 4 and 2 units, two samples a unit: a half is 2 units and 1; a test sample is never drawn."""
    units = np.repeat(np.array([1, 2, 3, 4, 5, 6]), 2)
    strata, able = np.where(units > 4, 1, 0), np.ones(12, dtype=bool)
    half = draw("set", 0.5, units, able, strata)
    assert [len(np.unique(units[half & (strata == s)])) for s in (0, 1)] == [2, 1]
    assert half.reshape(6, 2).all(axis=1).sum() == 3  # whole units
    more = draw("set", 0.9, units, able, strata)
    assert (more | half == more).all()
    assert [len(np.unique(units[more & (strata == s)])) for s in (0, 1)] == [3, 1]  # one of each is left
    able[:2] = False
    assert not draw("set", 0.9, units, able, strata)[:2].any()
    assert not draw("set", 0, units, able).any()


@pytest.mark.parametrize("share", [-0.1, 1.0, True, "0.3", float("nan")])
def test_what_is_no_share(share):
    with pytest.raises(DataError, match="reserve is"):
        draw("set", share, np.arange(4), np.ones(4, dtype=bool))


def test_a_share_below_one_unit():
    with pytest.raises(DataError, match=r"0\.1 reserves nothing"):
        draw("set", 0.1, np.arange(4), np.ones(4, dtype=bool))


def test_pairs_stay_in_their_role_and_group():
    role, group = np.arange(400) % 2, np.arange(400) // 100
    order = repaired(role, group)
    assert (role[order] == role).all()
    assert (group[order] == group).all()
    assert sorted(order) == list(range(400))
    assert (order == np.arange(400)).mean() < 0.1


def halves(ids: list[str]) -> tuple[set[str], set[str]]:
    first, second = zip(*(i.split("-") for i in ids), strict=True)
    return set(first), set(second)


@pytest.mark.data(name="av_digits")
def test_reserved_digits_are_in_no_other_part():
    whole = named("av_digits", {"mini": True})
    for label in ("digit", "sum"):
        train, test, _, reserved = named("av_digits", {"mini": True, "reserve": 0.33, "label": label})
        assert len(train) + len(reserved) == len(whole.train)
        assert len(test) == len(whole.test)
        held, trained, tested = map(halves, (reserved.ids, train.ids, test.ids))
        assert not held[0] & (trained[0] | tested[0])  # images
        assert not held[1] & (trained[1] | tested[1])  # recordings
        assert set(reserved.groups) == set(train.groups)
    assert 0.25 < len(reserved) / len(whole.train) < 0.45
    assert load({"av_digits": {"mini": True, "reserve": 0.33, "part": "reserved", "label": "sum"}}).ids == reserved.ids


@pytest.mark.data(name="av_digits")
def test_the_sum_and_the_bits_of_two_digits():
    digits, sums, bits = (named("av_digits", {"mini": True, "label": label}) for label in ("digit", "sum", "bits"))
    for part in ("train", "test"):
        own, added, pairs = (getattr(one, part) for one in (digits, sums, bits))
        image = dict(zip((i.split("-")[0] for i in own.ids), own.labels, strict=True))
        sound = dict(zip((i.split("-")[1] for i in own.ids), own.labels, strict=True))
        given = [(image[i], sound[a]) for i, a in (name.split("-") for name in added.ids)]
        assert added.labels.tolist() == [i + a for i, a in given]
        assert pairs.ids == added.ids
        assert pairs.labels.tolist() == [2 * (i > 4) + (a > 4) for i, a in given]
        assert np.array_equal(added.modalities["image"], own.modalities["image"])
        assert (added.groups == own.groups).all()
        assert abs(np.corrcoef(np.array(given).T)[0, 1]) < 0.2  # one digit says nothing of the other
    assert sums.train.label_names[-1] == "18"
    assert bits.train.label_names == ("low-low", "low-high", "high-low", "high-high")


@pytest.mark.data(name="av_digits")
def test_speakers_are_chosen_and_their_pairs_do_not_depend_on_others():
    every = named("av_digits", {"mini": True, "label": "sum"}).train
    one, test, groups, _ = named("av_digits", {"mini": True, "label": "sum", "speakers": ["theo"]})
    assert set(groups) == set(test.groups) == {"theo"}
    assert one.ids == [i for i, g in zip(every.ids, every.groups, strict=True) if g == "theo"]
    for options, message in (
        ({"speakers": ["anna"]}, r"speakers\[0\] is 'anna'"),
        ({"speakers": []}, "no speaker is named"),
        ({"label": "product"}, "label is 'product'"),
        ({"reserve": 1.5}, "reserve is 1.5"),
        ({"part": "reserved"}, "no share is reserved"),
    ):
        with pytest.raises(DataError, match=message):
            load({"av_digits": {"mini": True, **options}})


@pytest.mark.data(name="har_hapt")
def test_reserved_people_are_in_no_other_part():
    whole = named("har_hapt", {"mini": True})
    train, test, groups, reserved = named("har_hapt", {"mini": True, "reserve": 0.33})
    people = set(reserved.groups)
    assert len(people) == 1
    assert people < set(whole.groups)
    assert set(groups) == set(whole.groups) - people
    assert test.ids == whole.test.ids
    assert len(train) + len(reserved) == len(whole.train)
    own, held, _, same = named("har_hapt", {"mini": True, "reserve": 0.33, "clients": 5})
    assert same.ids == reserved.ids
    assert len(set(own.groups)) == 5
    assert not people & (set(own.groups) | set(held.groups))
    with pytest.raises(DataError, match="has 5 people here, not 6"):
        named("har_hapt", {"mini": True, "reserve": 0.33, "clients": 6})


@pytest.mark.data(name="emoji_pairs")
def test_reserved_concepts_are_drawn_by_no_vendor():
    train, test, _, reserved = named("emoji_pairs", {"mini": True, "reserve": 0.33})
    concepts = [halves(part.ids)[1] for part in (train, test, reserved)]
    assert not concepts[2] & (concepts[0] | concepts[1])
    assert set(reserved.groups) == set(train.groups)
    assert set(reserved.labels) == set(range(8))


@pytest.mark.data(name="emoji_pairs")
def test_subgroups_as_classes():
    group, subgroup = (named("emoji_pairs", {"mini": True, "label": label}) for label in ("group", "subgroup"))
    assert subgroup.train.ids == group.train.ids
    assert len(subgroup.train.label_names) == 96
    above = {}
    for fine, coarse in zip(subgroup.train.labels, group.train.labels, strict=True):
        assert above.setdefault(int(fine), int(coarse)) == coarse
    assert len(above) == 12  # of the 96, in the small set


@pytest.mark.data(name="emoji_pairs")
def test_a_test_on_a_vendor_that_no_device_has(tmp_path: Path):
    """data.test is a source of its own: drawings of the concepts that the fleet trains on, by another vendor."""
    file = tmp_path / "run.yaml"
    known = {"mini": True, "label": "subgroup"}
    values = {
        "data": {
            "source": {"emoji_pairs": {**known, "vendors": ["openmoji", "twemoji", "fxemoji"]}},
            "partition": "natural",
            "test": {"emoji_pairs": {**known, "vendors": ["noto"], "part": "train"}},
        },
        "model": {"encoders": {"image": {"kind": "vision"}, "text": {"kind": "text", "vocabulary": 8192}}},
        "fleet": [{"name": name} for name in ("openmoji", "twemoji", "fxemoji")],
        "name": "other-vendor",
        "recipe": "end_to_end",
        "training": {"rounds": [1] * 6},
    }
    file.write_text(yaml.safe_dump(values))
    config, _ = load_run(file, {})
    prepared = shares_of(config, [device.name for device in config.fleet], tmp_path / "shares")
    test = load(prepared.test)
    assert prepared.test_origin == "given"
    assert set(test.groups) == {"noto"}
    seen = Counter(i.split("-")[1] for share in prepared.shares for i in load(share.path).ids)
    assert {i.split("-")[1] for i in test.ids} <= set(seen)
    assert prepared.label_names == test.label_names


def test_a_named_test_set_is_its_test_part_unless_told_otherwise():
    assert as_test("basic_motions") == {"basic_motions": {"part": "test"}}
    assert as_test({"basic_motions": None}) == {"basic_motions": {"part": "test"}}
    assert as_test({"basic_motions": {"part": "train"}}) == {"basic_motions": {"part": "train"}}
    assert as_test("some/folder") == "some/folder"
    assert set(load(as_test("basic_motions")).groups) == {f"test-{n:02d}" for n in range(40)}

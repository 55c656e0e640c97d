"""Traces of devices: patterns from states, FLASH's files, and who is there when."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from edgefl.errors import ConfigError
from edgefl.records import Attempt, Speed
from edgefl.trace_files import read_links, read_states
from edgefl.traces import DAY_MS, NEEDS, Change, LinkSpeed, Pattern, Traces, pattern_of, synthetic

#: As FLASH has them: a phone that charges from 23:00:10 on, on Wi-Fi, locked but for ten seconds.
PHONE = """2020-01-02 23:00:00\tWIFI
2020-01-02 23:00:00\tscreen_lock
2020-01-02 23:00:05\t85%
2020-01-02 23:00:10\tbattery_charged_on
2020-01-02 23:00:30\tscreen_unlock
2020-01-02 23:00:40\tscreen_lock
2020-01-02 23:01:00\t4G
2020-01-02 23:01:40\tbattery_charged_off
"""


def states(place: Path, **phones: str) -> Path:
    file = place / "states.json"
    file.write_text(
        json.dumps({n: {"guid": n, "model": "SM", "messages": text} for n, text in phones.items()}, indent=1)
    )
    return file


def test_a_phone_is_there_while_it_has_all_that_is_needed(tmp_path: Path) -> None:
    (found,), faults = read_states(states(tmp_path, phone=PHONE), NEEDS)
    assert faults == []
    assert found == Pattern(100_000, (10_000, 30_000, 40_000, 60_000), False, 23 * 3_600_000, DAY_MS)
    (charging,), _ = read_states(states(tmp_path, phone=PHONE), ["charging"])
    assert charging.edges == (10_000, 100_000)
    (always,), _ = read_states(states(tmp_path, phone=PHONE), [])
    assert (always.edges, always.inverted) == ((), True)


def test_phones_that_cannot_be_read_are_left_out_by_name_and_line(tmp_path: Path) -> None:
    file = states(tmp_path, good=PHONE, bad="2020-01-02 23:00:00\twifi\n2020-01-02\twifi\n", odd=PHONE + "x\ty")
    found, faults = read_states(file, NEEDS)
    assert len(found) == 1
    assert [fault.split(" of ")[0] for fault in faults] == ["bad: line 2", "odd: line 9"]
    with pytest.raises(ConfigError, match="bad: its messages span no time") as raised:
        read_states(states(tmp_path, bad="2020-01-02 23:00:00\twifi"), NEEDS)
    with pytest.raises(ConfigError, match="old: its messages span more than 366 days"):
        read_states(states(tmp_path, old=PHONE + "1020-01-02 23:00:00\twifi"), NEEDS)
    assert "Mend it, or take that device out" in raised.value.remedy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{\n"a": {"messages": "x"},\n"b": }\n', "line 3, the trace"),
        ('{"a": {"words": ""}}', "missing required field `messages`"),
        ("{}", "it names no device"),
    ],
)
def test_what_is_no_trace_file_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "states.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why) as raised:
        read_states(file, NEEDS)
    assert str(file) in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_links(tmp_path / "nowhere.json")


def test_link_speeds_are_in_kib(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text('{"a": {"down_u": 100, "down_sigma": 10.5, "up_u": 50, "up_sigma": 0}}')
    assert read_links(file) == [LinkSpeed(102_400, 10_752, 51_200, 0)]
    file.write_text('{"a": {"down_u": 0, "down_sigma": 10.5, "up_u": 50, "up_sigma": 0}}')
    with pytest.raises(ConfigError, match="a: speeds are above zero"):
        read_links(file)


def test_edges_are_where_presence_changes_however_they_are_asked_for() -> None:
    patterns = [*synthetic(1, NEEDS)[:20], pattern_of([], 1000, ["wifi"]), pattern_of([], 1000, [])]
    patterns.append(
        pattern_of([Change(0, "wifi", True), Change(40, "wifi", False), Change(70, "wifi", True)], 90, ["wifi"])
    )
    traces = Traces([f"d{n:03}" for n in range(300)], patterns, seed=2)
    every = np.arange(300)
    at, seen = 0, 0
    for _ in range(200):
        soonest = traces.next_edges(at)
        before, at = traces.there(at), int(soonest.min())
        changed = traces.there(at) != before
        assert changed.tolist() == (soonest == at).tolist(), "those whose edge this is, and nobody else"
        assert traces.next_edges(at - 1, [int(every[changed][0])])[0] == at
        seen += int(changed.sum())
    assert seen >= 200
    lasting = [n for n in range(300) if math.isinf(traces.next_edges(0)[n])]
    assert {bool(traces.there(7, [n])[0]) for n in lasting} == {True, False}


def test_synthetic_devices_are_there_a_fifth_of_the_time_each_by_the_seed() -> None:
    names = [f"d{n:03}" for n in range(400)]
    shares = [Traces(names, synthetic(seed, NEEDS), seed).there(3_600_000).mean() for seed in range(8)]
    assert 0.15 < np.mean(shares) < 0.27
    assert len(set(shares)) > 1
    again = Traces(names, synthetic(3, NEEDS), 3).there(3_600_000)
    assert (again == Traces(names, synthetic(3, NEEDS), 3).there(3_600_000)).all()
    assert Traces(names, synthetic(3, []), 3).there(3_600_000).all()


def test_links_differ_between_devices_and_rounds_around_the_profiles() -> None:
    traces = Traces(["a", "b"], synthetic(1, NEEDS), 1)
    plain, known = traces.with_link(0, Speed()), traces.with_link(0, Speed(down_bytes=1e6, up_bytes=1e6))
    assert plain.down_bytes / 1_250_000 == pytest.approx(known.down_bytes / 1e6)
    assert traces.with_link(1, Speed()).down_bytes != plain.down_bytes
    one, other = (traces.drawn(0, known, Attempt("r", 1, number, 1)) for number in (1, 2))
    assert one != other
    assert one == traces.drawn(0, known, Attempt("r", 1, 1, 1))
    filed = Traces(["a", "b"], synthetic(1, NEEDS), 1, [LinkSpeed(10.0, 0.0, 5.0, 0.0)])
    assert filed.drawn(1, filed.with_link(1, Speed()), Attempt("r", 1, 1, 1)) == (10.0, 5.0)

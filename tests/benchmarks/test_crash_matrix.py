"""The crash matrix' points are what their names say."""

from __future__ import annotations

import pytest

from benchmarks.crash.crash_child import POINTS, WHATS, point
from benchmarks.crash.crash_matrix import TOLD, points


def test_every_point_has_a_name_of_its_own_that_is_read_again():
    every = points()
    assert [point(str(at)) for at in every] == every
    assert len({str(at) for at in every}) == len(every)
    assert {at.what for at in every} == set(WHATS)
    named = {at.role: POINTS.get(at.role, TOLD) for at in every}
    assert [at for at in every if at.name not in named[at.role]] == []


@pytest.mark.parametrize("text", ["agent/save/before/1/read_only", "agent/save/during/1", "agent/save", ""])
def test_what_is_no_point_is_refused(text):
    with pytest.raises(ValueError, match=r"no such point|not enough values"):
        point(text)

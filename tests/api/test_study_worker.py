"""A study's worker: what it says a cell takes, and that it keeps nothing of a cell."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from edgefl.api import study_worker
from edgefl.api.study_cells import Work
from edgefl.errors import DataError

MIB = 2**20


@pytest.mark.parametrize(
    ("before", "settled", "most", "expected"),
    [
        (65, 334, 442, 711),  # torch came while it was priced: the data are read again on top of it
        (334, 335, 711, 712),  # of the next cell, by the largest size that the process ever had
        (334, 335, None, 336),  # a kernel that does not tell the largest size: what pricing left
        (400, 390, 395, 390),
    ],
)
def test_a_cell_s_data_are_read_in_a_process_that_has_torch(monkeypatch, before, settled, most, expected):
    monkeypatch.setattr(study_worker, "price_of", lambda *_: SimpleNamespace(devices=[]))
    monkeypatch.setattr(study_worker, "current_rss_bytes", lambda: before * MIB)
    monkeypatch.setattr(study_worker, "idle_rss_bytes", lambda: settled * MIB)
    monkeypatch.setattr(study_worker, "peak_bytes", lambda: None if most is None else most * MIB)
    body = msgspec.to_builtins([Work("demo", {}, "one", "runs", in_process=True)])
    (made,) = study_worker.estimate(body, lambda _: None)
    assert made.process == expected * MIB + study_worker.TRAINED_BYTES
    (apart,) = study_worker.estimate(msgspec.to_builtins([Work("demo", {}, "one", "runs")]), lambda _: None)
    assert apart.process == expected * MIB


@pytest.mark.slow
def test_a_cell_without_data_is_not_priced_and_the_others_are(tmp_path):
    lost = Work("demo", {"data.source": str(tmp_path / "none.npz")}, "lost", "runs")
    body = msgspec.to_builtins([lost, Work("demo", {}, "one", "runs")])
    assert len(study_worker.estimate(body, lambda _: None)) == 1


@pytest.mark.parametrize("failed", [False, True])
def test_memory_is_given_back_after_a_cell(monkeypatch, failed):
    done: list[str] = []

    def carried_out(*_: object) -> tuple[None, str]:
        done.append("cell")
        if failed:
            raise DataError("the disk is gone")
        return None, ""

    monkeypatch.setattr(study_worker, "run_or_resume", carried_out)
    monkeypatch.setattr(study_worker, "settle", lambda: done.append("settled"))
    body = msgspec.to_builtins(Work("demo", {}, "one", "runs", in_process=True))
    if failed:
        with pytest.raises(DataError):
            study_worker.run_cell(body, lambda _: None)
    else:
        assert study_worker.run_cell(body, lambda _: None) == ""
    assert done == ["cell", "settled"]

"""What a run would have cost end to end, kept in its directory: whole, or made again."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_fixture import a_plan

from coordinator.ledger.ledger import Ledger
from edgefl.api.runs import END_TO_END, priced
from edgefl.run_records import AssignmentRow, DeviceRow, RunReport
from edgefl.storage.disk import LEDGER

REPORT = RunReport(
    run="r1",
    devices=(DeviceRow("one", samples={"": 8, "acc": 8}),),
    assignments=(AssignmentRow("one", status="done"),),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory; a stage of its plan trains a part of the model."""
    with Ledger(tmp_path / LEDGER) as ledger:
        ledger.create(a_plan(), {}, {"task": 8}, 100.0)
    return tmp_path


@pytest.mark.parametrize("content", [b'{"one":', b'{"one": 3}', b"\xff", b""])
def test_prices_that_are_not_whole_are_made_again(run: Path, content: bytes) -> None:
    first = priced(REPORT, run)
    assert first.end_to_end["one"].flops > 0
    whole = (run / END_TO_END).read_bytes()
    (run / END_TO_END).write_bytes(content)
    with (run / END_TO_END).open("rb") as reading:
        assert priced(REPORT, run) == first
        assert reading.read() == content  # the new file has taken the place of this one
    assert (run / END_TO_END).read_bytes() == whole


def test_kept_prices_are_taken_as_they_are(run: Path) -> None:
    first = priced(REPORT, run)
    (run / LEDGER).unlink()
    assert priced(REPORT, run) == first

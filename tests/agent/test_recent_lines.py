"""An agent's last log lines: what is kept, what a request gets, and the bounds of both."""

from __future__ import annotations

import io

from device_agent.runtime.recent_lines import LINE_CHARS, PAUSE_S, RecentLines
from edgefl.log_lines import line_writer
from edgefl.protocol.messages import MOST_LOG_BYTES, MOST_LOG_LINES, LogLines, LogRequest, encode


def kept(*lines: str) -> RecentLines:
    recent = RecentLines()
    for line in lines:
        recent.write(line)
    return recent


def test_the_newest_lines_come_in_their_order() -> None:
    recent = kept("one", "two", "three")
    assert recent.answer("d", LogRequest(7, 2), 0.0) == LogLines("d", 7, 3, ("two", "three"))


def test_lines_that_are_known_are_not_sent_again_unless_the_agent_was_started_anew() -> None:
    recent = kept("one", "two", "three")
    assert recent.answer("d", LogRequest(1, 9, after=2), 0.0) == LogLines("d", 1, 3, ("three",))
    assert recent.answer("d", LogRequest(2, 9, after=3), 9.0) == LogLines("d", 2, 3, ())
    assert recent.answer("d", LogRequest(3, 9, after=40), 18.0) == LogLines("d", 3, 3, ("one", "two", "three"))


def test_what_is_asked_for_without_sense_is_bounded() -> None:
    recent = kept(*(f"{n} {'é' * 10**4}" for n in range(10**3)))
    found = recent.answer("d", LogRequest(1, 10**9, after=-5), 0.0)
    assert found is not None
    assert len(found.lines) <= MOST_LOG_LINES
    assert sum(len(line.encode()) for line in found.lines) <= MOST_LOG_BYTES
    assert max(map(len, found.lines)) == LINE_CHARS
    assert found.lines[-1].startswith("999 ")
    assert len(encode(found)) < 1.1 * MOST_LOG_BYTES
    assert recent.answer("d", LogRequest(2, -1), 9.0) == LogLines("d", 2, 1000, ())


def test_halves_of_characters_do_not_stop_an_answer() -> None:
    found = kept("a\ud800b").answer("d", LogRequest(1, 1), 0.0)
    assert found is not None
    assert encode(found)


def test_answers_are_rare_however_often_one_asks() -> None:
    recent = kept("one")
    answers = [recent.answer("d", LogRequest(n, 1), n * PAUSE_S / 10) for n in range(21)]
    assert [answer.request for answer in answers if answer is not None] == [0, 10, 20]


def test_a_device_that_keeps_its_log_says_so() -> None:
    recent = RecentLines(shared=False)
    recent.write("secret")
    answer = recent.answer("d", LogRequest(1, 9), 0.0)
    assert answer == LogLines("d", 1, refusal="this device keeps its log to itself (--no-logs)")


def test_what_is_written_is_kept() -> None:
    out = io.StringIO()
    recent = RecentLines(out)
    line_writer("text", recent)("declined", reason="memory")
    found = recent.answer("d", LogRequest(1, 9), 0.0)
    assert found is not None
    assert out.getvalue() == found.lines[0] + "\n"
    assert found.lines[0].endswith("! declined       reason=memory")

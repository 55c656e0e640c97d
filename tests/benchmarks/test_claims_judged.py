"""Verdicts of the claims: the paper's effect, the room that a rival leaves for it, and who really took part."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from data_fixture import needed

from benchmarks.accuracy.claims import baseline, taking_part
from benchmarks.accuracy.claims.__main__ import RESULTS, standing
from benchmarks.accuracy.claims.as_fleet import FILE
from benchmarks.accuracy.claims.baseline import Baseline
from benchmarks.accuracy.claims.judge import SMALLER, Comparison, claims_of, is_tested, judged, verdict
from benchmarks.accuracy.claims.outcome import Outcome, Point
from benchmarks.accuracy.claims.page import COMMAND, write
from benchmarks.accuracy.claims.study import Study, papers

TASK, CONDITION = "har", "mm50-mc50"


def runs(method: str, *values: float, condition: str = CONDITION) -> dict[int, Outcome]:
    return {
        seed: Outcome("mmic", TASK, condition, method, seed, "", curve=(Point(1, {"acc+gyro|none|accuracy": value}),))
        for seed, value in enumerate(values, start=1)
    }


def rows(**methods: tuple[float, ...]):
    return {(TASK, CONDITION, name): runs(name, *values) for name, values in methods.items()}


def compared(effect: float | None, bound: str | float = "", **fields) -> Comparison:
    return Comparison(TASK, CONDITION, "mmic", "fedavg", "accuracy", effect=effect, bound=bound, **fields)


def test_headroom_is_what_the_rival_leaves_up_to_the_bound() -> None:
    table = rows(mmic=(0.905, 0.9, 0.895), fedavg=(0.9, 0.9, 0.9), centralised=(0.93, 0.93, 0.93))
    for bound in ("centralised", "baseline", 93.0):
        found = judged(compared(4.0, bound), table, {"baseline": 93.0})
        assert found.headroom == pytest.approx(3.0)
        assert (found.verdict, found.tested) == (SMALLER, False)
    assert judged(compared(2.9, "centralised"), table).tested
    assert judged(compared(4.0), table).tested  # of no bound nothing is known


def test_headroom_of_what_is_lost_is_down_to_the_bound() -> None:
    table = {(TASK, "mm20-mc50", name): runs(name, 0.9, 0.9, condition="mm20-mc50") for name in ("mmic", "fedavg")}
    table |= rows(mmic=(0.89, 0.891), fedavg=(0.86, 0.861))
    found = judged(compared(5.0, 0, lower=True, falling="mm20-mc50"), table)
    assert found.headroom == pytest.approx(3.95)


def test_a_claim_is_judged_by_the_comparisons_that_leave_room() -> None:
    table = rows(mmic=(0.88, 0.881, 0.879), fedavg=(0.9, 0.9, 0.9))
    no, none = judged(compared(1.0, 93.0), table), judged(compared(4.0, 93.0), table)
    even = rows(mmic=(0.905, 0.9, 0.895), fedavg=(0.9, 0.9, 0.9))
    smaller, unknown = judged(compared(2.0, 93.0), even), judged(compared(1.0, 93.0), even)
    yes = judged(compared(1.0, 93.0), rows(mmic=(0.92, 0.921, 0.919), fedavg=(0.9, 0.9, 0.9)))
    assert (no.verdict, none.verdict, smaller.verdict, unknown.verdict) == ("no", "no", SMALLER, "undecided")
    assert verdict([yes, none]) == "yes"
    assert verdict([yes, smaller, none]) == SMALLER
    assert verdict([yes, smaller, unknown]) == "undecided"
    assert verdict([yes, smaller, no]) == "no"
    assert (verdict([none]), is_tested([none]), is_tested([none, yes])) == ("no", False, True)


def test_the_page_says_what_excludes_the_papers_effect_and_what_is_not_tested(tmp_path) -> None:
    mmic = Study("mmic")
    lines = [
        row for each in rows(mmic=(0.905, 0.9, 0.895), fedadagrad=(0.9, 0.9, 0.9)).values() for row in each.values()
    ]
    write([(mmic, lines, [])], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "Of 1 comparisons that are neither yes nor no, and of which the paper gives an effect" in text
    assert "in the same unit, 1 exclude it." in text
    assert f"**{SMALLER}**" in text
    lines += runs("centralised", 0.93, 0.93).values()
    write([(mmic, lines, [])], tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"| 3.0 | **not tested ({SMALLER})**, 3 of 5 seeds |" in text
    assert "1 not tested, where rivals leave no room for the paper's effect." in text
    assert f"| +6.1 | 3.0 | 3 | {SMALLER} (no room) |" in text


def test_the_page_is_made_of_the_recorded_lines(tmp_path) -> None:
    found = [standing(Study(paper), RESULTS) for paper in papers()]
    folder = tmp_path / RESULTS.name
    folder.mkdir()
    shutil.copy(RESULTS / FILE, folder)
    write(
        found,
        folder.with_suffix(".md"),
        baseline.kept(RESULTS / baseline.FILE),
        taking_part.kept(RESULTS / taking_part.FILE),
    )

    def stable(page: Path) -> list[str]:
        return [line for line in page.read_text().splitlines() if "cores (" not in line]

    assert stable(folder.with_suffix(".md")) == stable(RESULTS.with_suffix(".md")), f"{COMMAND} --page"


def test_a_baseline_bounds_all_modalities_and_each_alone() -> None:
    assert Baseline("", 0.9, {"a": 0.7, "b": 0.8}).bounds == {"baseline": 90.0, "baseline alone": pytest.approx(75.0)}


@pytest.mark.parametrize("paper", papers())
def test_every_comparison_with_an_effect_has_it_everywhere_and_a_bound(paper: str) -> None:
    values = Study(paper).values
    for claim, asked in zip(claims_of(values), values["claims"], strict=True):
        known = [one.effect is not None for one in claim.comparisons]
        assert all(known) == any("effect" in one for one in asked["compare"]), claim.text
        assert all(one.bound != "" for one in claim.comparisons if one.effect is not None), claim.text


@pytest.mark.parametrize("paper", papers())
def test_of_every_recorded_task_it_is_known_how_many_devices_take_part(paper: str) -> None:
    counts = taking_part.kept(RESULTS / taking_part.FILE)
    study = Study(paper)
    for task in study.tasks:
        if "budget" not in study.tasks[task]:
            assert len(taking_part.told(study, task, counts)) == len(study.seeds)


def test_the_page_says_where_fewer_devices_take_part_than_the_fleet_has(tmp_path) -> None:
    mmic = Study("mmic")
    counts = {
        taking_part.key(taking_part.own_run(mmic, "har", "mm20-mc30", seed)): 30 - seed % 3 for seed in mmic.seeds
    }
    write([(mmic, [], [])], tmp_path / "page.md", None, counts)
    assert "**Of the 30 devices, 28 to 30 take part** (" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
@pytest.mark.data
def test_devices_without_samples_for_a_batch_do_not_count() -> None:
    needed("har_hapt")
    study = Study("mmic")
    values = taking_part.own_run(study, "har", "mm20-mc30", 1)
    assert taking_part.counted(values) == taking_part.kept(RESULTS / taking_part.FILE)[taking_part.key(values)] < 30

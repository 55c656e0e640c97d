"""The frontier's study: its run files load, costs are paired with end-to-end's, verdicts follow from intervals."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from benchmarks.accuracy.claims import tuning
from benchmarks.accuracy.claims.judge import MEASURES
from benchmarks.accuracy.claims.outcome import Outcome, Point, Results
from benchmarks.accuracy.claims.study import digest
from benchmarks.common.result_lines import rows_in
from benchmarks.common.spread import Interval
from benchmarks.cost.frontier import measured, study
from benchmarks.cost.frontier.figures import REFERENCE, Memory, first_at, rows_of, within
from benchmarks.cost.frontier.measured import Peak
from benchmarks.cost.frontier.page import ASKED, Shown, best, sentence, summary, write
from benchmarks.cost.frontier.plots import LOOKS
from edgefl.config.profiles import load_run

STUDY = study()
CHEAP = "freeze 9+27"


def outcome(method: str, seed: int, accuracies: list[float], cost: float = 1.0) -> Outcome:
    """A run with an evaluation every two rounds, each of which cost ``cost`` MiB, 10 times as many GFLOP, a second.

    Its steps take 8 times as many MiB.
    """
    curve = tuple(
        Point(2 * n, {"a+b|none|accuracy": value / 100}, n * cost * 2**20, n * cost * 1e10, float(n))
        for n, value in enumerate(accuracies, start=1)
    )
    told = {"settings": {"lr": 0.1}, "curve": curve, "step_peak_predicted": cost * 2**23}
    return Outcome("frontier", "har-scratch", "all", method, seed, "file", **told)


def runs(behind: list[float], cost: float = 0.25) -> list[Outcome]:
    """Of end-to-end training, and of one that is ``behind[seed]`` points behind it, at ``cost`` times its cost."""
    whole = [outcome(REFERENCE, seed, [50, 80, 90]) for seed, _ in enumerate(behind)]
    return whole + [outcome(CHEAP, seed, [50, 80, 90 - less], cost) for seed, less in enumerate(behind)]


@pytest.mark.slow
def test_every_method_of_every_task_is_a_run_file_that_loads(tmp_path):
    cells = [cell for cell in STUDY.cells() if cell.seed == STUDY.seeds[0]]
    assert {(cell.task, cell.method) for cell in cells} >= {(task, "layer-wise 2+10+24") for task in STUDY.tasks}
    assert {cell.method for cell in cells} == set(STUDY.methods)
    assert REFERENCE in STUDY.methods
    assert {task["measure"] for task in STUDY.tasks.values()} <= set(MEASURES)
    for cell in cells:
        made = STUDY.run_file(cell, {"lr": 1e-3})
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
        config, _ = load_run(str(tmp_path / "run.yaml"))
        assert config.training.lr_fall == {"cosine": {}}
        kind, _, passes = STUDY.methods[cell.method]["kind"].partition(" ×")
        rounds = cell.method.removeprefix(kind).removesuffix(f" ×{passes}").strip()
        assert [n for n in config.training.rounds if n] == [int(n) for n in rounds.split("+")]
        assert config.training.epochs == int(passes or 1)
        assert STUDY.tuned_as(cell).method in STUDY.methods


def test_costs_are_held_against_the_same_seed_s_end_to_end():
    whole, cheap = rows_of(runs([0.0, 1.0, 2.0]), list(STUDY.methods))
    assert (whole.method, whole.difference.mean, whole.less) == (REFERENCE, 0.0, (1.0, 1.0, 1.0))
    assert cheap.difference.mean == pytest.approx(-1.0)
    # of 3 evaluations at 0.25 MiB; seconds are alike
    assert tuple(cheap.total) == pytest.approx((0.75, 7.5, 3.0))
    assert tuple(cheap.less) == pytest.approx((4.0, 4.0, 1.0))
    assert (whole.memory, cheap.memory) == ((8.0, 1.0), (2.0, 4.0))


def test_an_accuracy_on_the_way_is_a_trailing_mean_of_three():
    row = outcome(CHEAP, 1, [50, 92, 80, 88, 90])
    # means: 50, 71, 74, 86.7, 86
    assert first_at(row, 86.5).mib == 4.0
    assert first_at(row, 70.0).mib == 2.0
    assert first_at(row, 90.0) is None


def test_a_seed_without_a_reference_counts_nowhere():
    lone = outcome(CHEAP, 7, [99, 99, 99])
    assert rows_of([*runs([0.0, 0.0]), lone], list(STUDY.methods))[1].difference.seeds == 2
    assert rows_of([lone], list(STUDY.methods)) == []


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.5, 3.0, "yes"), (-0.6, 3.0, "undecided"), (-3.0, -0.6, "no"), (-3.0, -0.5, "undecided")],
)
def test_within_follows_from_the_ends_of_the_interval(low, high, expected):
    assert within(Interval(0.0, low, high, 3), 0.5) == expected


def test_what_is_asked_is_counted_over_tasks_by_mean_and_by_interval():
    near, apart = (rows_of(runs(behind), list(STUDY.methods)) for behind in ([0.0, 0.1, 0.2], [-4.0, 0.0, 3.0]))
    dear = rows_of(runs([0.0, 0.1, 0.2], cost=0.6), list(STUDY.methods))
    tables = {"near": near, "apart": apart, "dear": dear}
    half, third = ASKED.values()
    assert best(near, half).method == best(near, third).method == CHEAP
    assert best(dear, half) is None
    told = sentence(tables)
    assert told.startswith(
        "**Of 3 tasks, a schedule is within half a point of end-to-end training with half the FLOPs in 2"
    )
    assert "a third of the bytes and less step memory in 2 by the mean and 1 by the interval.**" in told
    line = "| apart | freeze 9+27: FLOPs ÷4.0, bytes ÷4.0, memory ÷4.0 | +0.3 (-8.4 to +9.1) |"
    assert line in "\n".join(summary(tables))
    assert "| dear | none |  | none |  |" in summary(tables)
    half_bytes = rows_of(runs([0.0, 0.1, 0.2], cost=0.4), list(STUDY.methods))
    assert best(half_bytes, half) is not None
    assert best(half_bytes, third) is None
    as_heavy = [row._replace(memory=Memory(8.0, 1.0)) for row in near]
    assert best(as_heavy, half).method == CHEAP
    assert best(as_heavy, third) is None


def test_the_page_has_a_picture_and_a_line_for_each_method(tmp_path):
    write(STUDY, Shown(runs([0.0, 0.1, 0.2]), 3, "Measured somewhere."), tmp_path / "frontier.md")
    text = (tmp_path / "frontier.md").read_text()
    assert text.splitlines()[2].startswith("**Of 1 task, a schedule is within half a point")
    assert (tmp_path / "frontier" / "frontier.svg").stat().st_size > 1000
    assert "| freeze 9+27 | 89.9 ± 0.1 | -0.1 (-0.3 to +0.1) | yes | yes | 1 (÷4.0) | 7.5 (÷4.0) | 2.0 (÷4.0) |" in text
    assert "## har_hapt from random weights" in text
    assert "take for any step.\nMeasured somewhere.\n" in text
    assert "## av_digits" not in text  # nothing of it has been run
    assert "* av_digits from random weights: everything" in text
    assert "layer-wise 2+10+24" in text.partition("## Not run yet")[2]


def test_measured_memory_is_told_against_end_to_end_of_the_same_task():
    whole, own, heads = measured.METHODS
    peaks = [Peak("a", whole, "1", 8.0), Peak("a", own, "2", 4.0), Peak("b", own, "3", 1.0)]
    text = measured.told(peaks)
    assert text.startswith(
        f"On real fleets it was, in parts of end-to-end training's: {own} 1/2.0 to 1/2.0 ("
    )  # b has none
    text = measured.told([*peaks, Peak("b", whole, "4", 3.0), Peak("b", heads, "5", 2.0)])
    assert f"{own} 1/3.0 to 1/2.0, {heads} 1/1.5 to 1/1.5" in text
    assert measured.told([]) == measured.told(peaks[:1]) == "It was not measured."


def test_memory_is_measured_once_for_a_run_file(monkeypatch, tmp_path):
    ran = []

    def measure(values):
        ran.append(values)
        return 2.0**20

    monkeypatch.setattr(measured, "measure", measure)
    monkeypatch.setattr("sys.argv", ["measured", "--only", "har-scratch", "--results", str(tmp_path / "new")])
    measured.main()
    found = rows_in(tmp_path / "new" / measured.FILE, Peak)
    assert [(one.task, one.method) for one in found] == [("har-scratch", method) for method in measured.METHODS[:2]]
    assert ran[0]["training"]["rounds"] == [0, 0, 2]
    assert ran[0]["training"]["epochs"] == 1
    measured.main()
    assert rows_in(tmp_path / "new" / measured.FILE, Peak) == found
    assert len(ran) == 2


def test_every_kind_of_schedule_has_a_look_of_its_own():
    kinds = {method["kind"] for method in STUDY.methods.values()}
    assert kinds == set(LOOKS)
    assert len(set(LOOKS.values())) == len(LOOKS)
    assert set(measured.METHODS) <= set(STUDY.methods)


def test_step_memory_is_the_largest_over_seeds_and_the_least_saving():
    whole, cheap = runs([0.0, 0.1])[:2], runs([0.0, 0.1])[2:]
    dear = msgspec.structs.replace(cheap[1], step_peak_predicted=2 * cheap[1].step_peak_predicted)
    assert rows_of([*whole, cheap[0], dear], list(STUDY.methods))[1].memory == (4.0, 2.0)


def test_trials_count_that_a_setting_was_chosen_by(tmp_path):
    cell = STUDY.tuned_as(next(STUDY.cells()))
    results = Results(tmp_path / "tuning.jsonl")
    for file in ("of another study", digest(tuning._values(STUDY, STUDY.trials(cell)[0]))):
        results.add(Outcome(**cell._asdict(), file=file))
    # the second is also the best of the first turn, whose run of all rounds is still due
    assert [one.file for one in tuning.decisive(STUDY, results)] == [results.rows[1].file]
